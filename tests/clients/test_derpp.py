"""DER++: the logits that are stored with the reservoir."""

from collections.abc import Callable

import torch
from support.systems.in_process import Federation

from fedkace_flwr.config import Config
from fedkace_flwr.training.stored_logits import StoredLogits

Make = Callable[..., Config]


def test_each_sample_keeps_the_logits_of_its_first_round(small: Make) -> None:
    federation = Federation(small(method="derpp", overlap=0, capacity=20, rounds=4))
    rows = dict[int, torch.Tensor]()
    for number in (1, 2, 3, 4):
        federation.train(0, number)
        state = federation.store(0).before(number + 1)
        stored = StoredLogits.read(state.extra, 10).of(state.buffer)
        assert len(state.buffer) >= 16 and stored.known.any(dim=1).all(), "every sample of the buffer has logits"
        for sample, arrived, logits, known in zip(
            state.buffer.content.tolist(), state.buffer.rounds.tolist(), stored.logits, stored.known, strict=True
        ):
            assert int(known.sum()) == 2 * arrived, "two new classes in each round"
            before = rows.setdefault(sample, logits)
            assert torch.equal(before, logits)


def test_alpha_and_beta_count_once_there_is_a_buffer(small: Make) -> None:
    def outcome(name: str, **changes: float) -> list[bytes]:
        federation = Federation(small(method="derpp", run_name=name, **changes))
        return [federation.train(0, number).weights["output.weight"].tobytes() for number in (1, 2)]

    usual = outcome("usual")
    for name, changes in (("alpha", {"derpp_alpha": 0.9}), ("beta", {"derpp_beta": 0.1})):
        other = outcome(name, **changes)
        assert other[0] == usual[0] and other[1] != usual[1]
