"""The report of finished runs: tables, figures and one page, from the results of :mod:`fedkace_flwr.experiments.results.loading`."""
