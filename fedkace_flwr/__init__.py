"""FedKACE: streaming federated continual learning on Flower."""

__version__ = "0.1.0"
