"""FedKACE: streaming federated continual learning on Flower."""

__version__ = "1.0.0"
