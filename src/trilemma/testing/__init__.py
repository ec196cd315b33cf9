"""The suites everything here passes, for a rule, an attack, an algorithm, a model, a data set of your own.

    pip install 'trilemma[testing]'
    pytest --pyargs trilemma.testing -p trilemma.testing.plugin --plugin my_rules.py

tests whatever `my_rules.py` registers. Without `--plugin` and without names, everything that is registered is
tested: that is how the package tests itself. Nothing else of the package imports it, or pytest.
"""
