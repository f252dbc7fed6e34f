"""Clipping, noise and masks that Flower's modifiers apply to a local model before it leaves its client."""

import copy
import math
from collections.abc import Sequence

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import make_ffn, secaggplus_mod
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters

from fedkace_flwr.config import Config
from fedkace_flwr.errors import MessageError
from fedkace_flwr.flower.internals import KEY_CLIPPING_NORM, ClientAppCallable, Mod, fitres_to_recorddict
from fedkace_flwr.messaging import wire
from fedkace_flwr.messaging.wire import NumpyArray, Weights
from fedkace_flwr.privacy import noise
from fedkace_flwr.sections import DELTA, SECAGG_RANGE

_SECRET = "fedkace.noise"


def guarded(
    handler: ClientAppCallable, config: Config, names: Sequence[str], attack: Mod | None = None
) -> ClientAppCallable:
    """Wrap a handler of training messages in the modifiers that the configuration asks for.

    Parameters
    ----------
    handler : callable
        Trains and replies with the local model.
    config : Config
        The configuration.
    names : sequence of str
        The arrays that leave a client (:attr:`fedkace_flwr.messaging.travelling.Travelling.update`).
    attack : Mod, optional
        What a hostile client does to its reply after clipping and noise, and before masks.
    """
    settings = config.privacy
    chain: list[Mod] = []
    if settings.secagg:
        chain += [secaggplus_mod, _Update(names)]
    if attack is not None:
        chain.append(attack)
    if settings.dp != "none" or settings.batchnorm_statistics == "local":
        chain.append(_Limit(config, names))
    return make_ffn(handler, chain)


class _Limit:
    """Clips and noises the arrays that leave the client; the others are returned as the server sent them.

    Flower's modifiers clip and noise all arrays of a message, so they are given only the arrays that leave the client:
    a ResNet's integer counters would dominate the norm, and would not remain integers.

    The noise depends on a secret of the device, on the model sent and on the model learned. A repeated round therefore
    gives the same reply; with fresh noise, the mean of several replies would be less private.
    """

    def __init__(self, config: Config, names: Sequence[str]) -> None:
        self._config = config
        self._settings = config.privacy
        self._names = names

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        reply = call_next(message, context)
        if reply.has_error() or wire.ARRAYS not in reply.content.array_records:
            return reply
        sent = wire.unpack(message.content.array_records[wire.ARRAYS])
        learned = wire.unpack(reply.content.array_records[wire.ARRAYS])
        names = [name for name in self._names if name in learned]
        before: Weights = {name: sent[name] for name in names}
        after: Weights = {name: learned[name] for name in names}
        if self._settings.dp != "none":
            after = self._private(message, context, before, after)
        reply.content[wire.ARRAYS] = wire.array_record({name: after.get(name, sent[name]) for name in learned})
        return reply

    def _private(self, message: Message, context: Context, before: Weights, after: Weights) -> Weights:
        settings = self._settings
        if all(np.array_equal(before[name], after[name]) for name in before):
            raise MessageError(
                "the local model is the one that was sent: Flower's modifiers cannot clip an update of zero"
            )
        answered = self._flowers(message, context, before, after)
        if answered.has_error():
            raise MessageError(f"Flower's modifier: {answered.error.reason}", "error")
        limited = wire.unpack(answered.content.array_records[wire.ARRAYS])
        return noise.with_floor(limited, before) if settings.dp == "local" else limited

    def _flowers(self, message: Message, context: Context, before: Weights, after: Weights) -> Message:
        settings = self._settings
        question = copy.copy(message)
        question.content = RecordDict(
            {
                wire.ARRAYS: wire.array_record(before),
                wire.CONFIG: ConfigRecord({KEY_CLIPPING_NORM: settings.dp_clip}),
            }
        )

        def learned(question: Message, context: Context) -> Message:
            return Message(RecordDict({wire.ARRAYS: wire.array_record(after)}), reply_to=question)

        if settings.dp == "central":
            return fixedclipping_mod(question, context, learned)
        # Its noise is sensitivity * sqrt(2 ln(1.25 / delta)) / epsilon, a formula for one release and epsilon up to 1.
        # It is used only to set the deviation; accounting.py computes epsilon over all rounds.
        once = math.sqrt(2 * math.log(1.25 / DELTA))
        modifier = LocalDpMod(settings.dp_clip, settings.dp_noise * settings.dp_clip, once, DELTA)
        with noise.numpy_noise(noise.fingerprint(self._secret(message, context), before, after)):
            return modifier(question, context, learned)

    def _secret(self, message: Message, context: Context) -> bytes:
        if self._settings.dp_seeded:
            told = message.content.config_records[wire.CONFIG]
            client, number = told[wire.CLIENT], told[wire.ROUND]
            assert isinstance(client, int) and isinstance(number, int)
            return noise.seeded_secret(self._config.run.seed, "client", client, number)
        held = context.state.config_records.setdefault(_SECRET, ConfigRecord({"secret": noise.fresh_secret()}))
        secret = held["secret"]
        assert isinstance(secret, bytes)
        return secret


class _Update:
    """Turns a reply into the update that SecAgg+ masks, in the form of Flower's earlier interface.

    Updates, unlike models, are centred at zero, so one range serves all arrays. A client that sits the round out adds a
    zero update of weight zero, because its masks are part of the sum. What a reply does not hold has not moved.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        sent = wire.unpack(message.content.array_records[wire.ARRAYS])
        trained = wire.ARRAYS in reply.content.array_records
        learned = {**sent, **wire.unpack(reply.content.array_records[wire.ARRAYS])} if trained else sent
        update = [learned[name].astype(np.float64) - sent[name] for name in self._names]
        for name, moved in zip(self._names, update, strict=True):
            self._check(name, moved)
        result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters(update), int(trained), {})
        content = fitres_to_recorddict(result, keep_input=False)
        content[wire.METRICS] = reply.content.metric_records[wire.METRICS]
        return Message(content, reply_to=message)

    def _check(self, name: str, moved: NumpyArray) -> None:
        # The server cannot detect this under the mask: SecAgg+ clips silently, and a NaN becomes an arbitrary number.
        largest, limit = float(np.abs(moved).max(initial=0.0)), SECAGG_RANGE
        if not largest <= limit:
            raise MessageError(f"{name} moved by {largest:.4g}; secagg = true allows at most {limit:g}", "values")
