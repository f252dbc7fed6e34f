"""The client of federated averaging (McMahan et al., AISTATS 2017): :class:`fedkace_flwr.clients.base.ClientRule` as it is."""

from fedkace_flwr.clients.base import ClientRule
from fedkace_flwr.registry import Method

METHOD = Method(ClientRule, "FedAVG", server="fedkace_flwr.strategies.fedavg:FedAvg", is_mean=True, replays=False)
