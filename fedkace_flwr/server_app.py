"""Flower ServerApp: reads the run configuration and runs the rounds with the chosen method's server rule."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedkace_flwr import __version__
from fedkace_flwr.config import Config, keys_affecting
from fedkace_flwr.configured import check_network, check_rounds, configured, warn_of_replacements
from fedkace_flwr.data.datasets import Dataset
from fedkace_flwr.errors import ConfigError, FedkaceError
from fedkace_flwr.experiment import Experiment, as_arrays
from fedkace_flwr.export.card import Training
from fedkace_flwr.export.folder import packed_adapters, write_folder
from fedkace_flwr.export.global_model import global_model, why_not_left
from fedkace_flwr.flower.logs import join_flower_log
from fedkace_flwr.inference.kept_models import MODEL
from fedkace_flwr.messaging import wire
from fedkace_flwr.privacy.accounting import spent
from fedkace_flwr.registry import Method
from fedkace_flwr.results.on_alarm import check_command, tell
from fedkace_flwr.results.orders import Orders
from fedkace_flwr.results.plot import import_ahead
from fedkace_flwr.results.run_folder import RunFolder
from fedkace_flwr.results.status import Status
from fedkace_flwr.results.trackers.catalogue import check_tracker
from fedkace_flwr.rounds.driver import RoundDriver
from fedkace_flwr.rounds.server_round import RoundReport
from fedkace_flwr.storage.checkpoint import Checkpoint
from fedkace_flwr.storage.paths import run_folder

logger = logging.getLogger(__name__)

app = ServerApp()
join_flower_log()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Check the configuration, run the rounds and write the run's folder."""
    try:
        config = Config.parse(context.run_config)
        run(grid, config, context.run_id)
    except FedkaceError as error:
        logger.error("%s: %s", type(error).__name__, error)
        raise


def run(grid: Grid, config: Config, run_id: int) -> None:
    """Run one experiment over a grid.

    Raises
    ------
    FedkaceError
        Before the first round: the configuration, the data or the results folder is unsuitable. Later: the run
        cannot go on.
    """
    method, config = configured(config)
    if config.run.resume and not config.run.run_name:
        raise ConfigError('resume = true: name the run to go on with, for example run-name = "mine"')
    if config.stream.rounds == 0 and (reason := method.strategy(config).why_not_longer(0, 1)):
        raise ConfigError(f"rounds = 0: {reason}; must be the number of rounds")
    warn_of_replacements(config)
    for key, value in config.unread.items():
        logger.warning(
            "%s = %r has no effect with method = %r, dataset = %r and network = %r",
            key,
            value,
            config.method,
            config.data.dataset,
            config.model.network,
        )
    check_network(method, config)
    experiment = Experiment(config)
    _tell_of_test_share(config.data.test_share, experiment.dataset)
    experiment.check_streams()
    experiment.check_given_weights()
    _ = experiment.travelling  # which may be refused
    check_tracker(config)
    check_command(config)
    with ExitStack() as opened:
        show = opened.enter_context(_exposed(config.run.metrics_port))
        folder = RunFolder(run_folder(config, run_id), resume=config.run.resume, data=experiment.dataset.digest)
        opened.callback(folder.close)
        _run(grid, config, run_id, method, experiment, folder, show)


def _tell_of_test_share(share: float, dataset: Dataset) -> None:
    if dataset.split_digest:
        logger.info("%s has no test split; test-share = %g of each class is one", dataset.name, share)
    elif dataset.digest and share != Config().data.test_share:
        logger.warning("test-share = %r has no effect: data set %s has a test split", share, dataset.name)


@contextmanager
def _exposed(port: int) -> Iterator[Callable[[Status], None]]:
    """What shows the state of the run to Prometheus, at a port; does nothing if that is 0.

    Raises
    ------
    ConfigError
        The package that it needs is not installed, or nothing can listen at the port.
    """
    if not port:
        yield lambda status: None
        return
    try:
        from fedkace_flwr.results.exposition import Exposition
    except ImportError as fault:
        raise ConfigError(
            f"metrics-port = {port}: the package prometheus-client cannot be imported ({fault}); "
            "pip install 'fedkace-flwr[metrics]'"
        ) from fault
    exposition = Exposition(port)
    try:
        yield exposition.show
    finally:
        exposition.close()


def _run(
    grid: Grid,
    config: Config,
    run_id: int,
    method: Method,
    experiment: Experiment,
    folder: RunFolder,
    show: Callable[[Status], None],
) -> None:
    orders = Orders(folder.path)
    found, token = None, f"{run_id:020d}"  # of fixed length, so that byte counts do not depend on it
    if config.run.resume and folder.begun:
        if _is_done(config, folder):
            how = "was stopped; fedkace stop --undo lets it go on" if orders.stopped else "is finished; nothing to do"
            logger.info("%s %s", folder.path, how)
            return
        found = folder.go_on(config, experiment.device)
        # Clients may have trained before the first checkpoint, and they recognise what they did by the token.
        token = found.run if found else folder.token() or token
    if found is None:
        folder.begin(config, experiment.device, token)
    if method.client.receives_model and (config.data.arrives or config.run.gate == "hold"):
        folder.checkpoints.keep_past(config.run.past_models)
    logger.info("results go to %s", folder.path)
    initial = as_arrays(experiment.initial_weights())
    weights = found.weights if found else {name: initial[name] for name in experiment.travelling.sent}

    def publish() -> None:
        named = {"run": folder.path.name, "method": config.method, "version": __version__}
        status = {**named, **driver.described()}
        show(status)
        if config.data.arrives or driver.members.keyed:
            folder.write_status(status)

    def keep(report: RoundReport, arrays: ArrayRecord) -> None:
        privacy = spent(config.privacy, driver.most_asked)
        record = report.record(driver.members.count, method.metrics) | privacy
        folder.add_round(record)
        publish()
        if report.alarms:  # before the checkpoint: a server that is killed meanwhile repeats the round
            names = {seat["seat"]: seat["name"] for seat in driver.members.table()}
            alarms = [{**asdict(alarm), "name": names.get(alarm.client, "")} for alarm in report.alarms]
            tell(config, folder.path, alarms)
        folder.save(Checkpoint(report.number, token, wire.unpack(arrays), *driver.checkpoint()))
        logger.info("round %d%s: accuracy %s", report.number, of_all, _percent(record["accuracy"]))

    rule = method.strategy(config)
    of_all = f" of {config.stream.rounds}" if config.stream.rounds else ""
    past = folder.checkpoints.of_round
    frozen = (lambda: wire.array_record(experiment.frozen_part)) if experiment.frozen_digest else None
    driver = RoundDriver(rule, config, experiment.travelling, keep, orders, past, publish, frozen)
    if found:
        driver.restore(found.round, found.arrays, found.record)
        logger.info("going on after round %d%s", found.round, of_all)
    import_ahead()
    told = ConfigRecord({wire.RUN: token})
    if digest := experiment.frozen_digest:
        told[wire.FROZEN] = digest
    result = driver.start(
        grid,
        wire.array_record(weights),
        num_rounds=config.stream.rounds,
        timeout=config.run.deadline,
        train_config=told,
        evaluate_config=told,
    )

    def leave_model(rounds: Sequence[Mapping[str, Any]]) -> None:
        if not rounds:
            logger.info("no model is left: no round was finished")
            return
        last = rounds[-1]["round"]
        agreed = driver.class_names.agreed.names_in(last)
        if reason := rule.lacks_global_model() or why_not_left(experiment, agreed):
            logger.info("no model is left: %s", reason)
        else:
            weights = wire.unpack(result.arrays)
            kept, adapters = global_model(experiment, weights, last, agreed), packed_adapters(weights)
            write_folder(folder.path / MODEL, kept, Training(config, rounds), adapters=adapters)

    summary = folder.finish(config, leave_model, stopped=orders.stopped)
    publish()
    logger.info(
        "average accuracy %s, chance %s; %ssee %s",
        _percent(summary["average_accuracy"]),
        _percent(summary["average_chance"]),
        _left_out(summary["failures_by_client"]),
        folder.path / "accuracy.png",
    )


def _is_done(config: Config, folder: RunFolder) -> bool:
    """Whether a run that was begun has no round left to do; else it can go on.

    Raises
    ------
    ConfigError
        A key differs that may not change, that the rounds which are done contradict, or that no round is left for.
    """
    changed = folder.changed(config)
    if folder.finished and Orders(folder.path).stopped:
        return True
    if folder.finished and "rounds" not in changed and not folder.was_stopped:
        for key in changed.keys() & keys_affecting("numbers"):
            raise ConfigError(
                f"{key} = {changed[key][1]!r}: the run in {folder.path} is finished, and was run with {changed[key][0]!r}; "
                "set rounds to more than it has, and the further ones use it"
            )
        return True
    done = folder.checkpoints.newest()
    planned, _ = changed.get("rounds", (config.stream.rounds, None))
    check_rounds(config, planned, done.round if done else 0)
    return False


def _left_out(failures: Mapping[str, Mapping[str, int]]) -> str:
    """Clients with rejected replies, how many and why; empty if there are none."""
    each = [
        f"client {client} ({', '.join(f'{count} {kind}' for kind, count in kinds.items())})"
        for client, kinds in failures.items()
    ]
    return f"left out: {', '.join(each)}; " if each else ""


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{100 * value:.2f} %"
