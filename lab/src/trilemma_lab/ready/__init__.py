"""Ready configurations of the laboratory, beside those of the core."""

from trilemma.experiment.ready import enter

enter(__name__)
