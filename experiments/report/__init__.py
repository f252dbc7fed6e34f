"""The report of finished runs: tables, figures and one page, from what :mod:`experiments.results.loading` reads."""
