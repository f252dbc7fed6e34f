"""The client of federated averaging (McMahan et al., AISTATS 2017): :class:`clients.base.ClientRule` as it is."""

from clients.base import ClientRule, chunk_alone
from fedkace_flwr.registry import Method

METHOD = Method(ClientRule, "FedAVG", server="strategies.fedavg:FedAvg", is_mean=True, samples=chunk_alone)
