"""Threat models: who may see what, as the covariance of the noise that is not known to them."""
