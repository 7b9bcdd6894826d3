"""What a training run works with: its directory, model, tokenizer, task and engine, opened and checked up front."""

import fcntl
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import yaml

from triage_jax.config import QUICKSTART, ConfigError, TrainConfig, flatten, from_dict, load_yaml, to_dict
from triage_jax.doctor import check_execution
from triage_jax.learner import (
    Checkpoints,
    Learner,
    LearnerState,
    batch_sharding,
    init_state,
    make_mesh,
    parameter_shardings,
)
from triage_jax.metrics import MetricLog, TensorBoard, Tracker, WeightsAndBiases, write_atomically
from triage_jax.model import ModelConfig, Params, load_dequantized, load_model, save_model
from triage_jax.model.load import load_config, read_json
from triage_jax.nvfp4.experts import check_count
from triage_jax.nvfp4.te import te_mesh
from triage_jax.rollout import Engine, LocalEngine
from triage_jax.rollout.sglang import SglangEngine
from triage_jax.tasks.arithmetic import ArithmeticTask
from triage_jax.tasks.jsonl import DataError, JsonlTask
from triage_jax.tasks.protocol import Task
from triage_jax.tasks.tokenizer import TextCodec, load_tokenizer

MAY_CHANGE = ("out", "steps", "eval.", "checkpoint.", "track.", "learner.", "rollout.sglang.")
"""Fields that a resumed run may change: none decides the value of a step (the mesh and micro-batches only round it)"""


class Stop(Exception):
    """SIGTERM or SIGINT arrived; raised at the next point where nothing would be lost."""


class StopSignal:
    """Turns SIGTERM and SIGINT into a flag that the loop looks at; the second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self._name: str | None = None

    def check(self) -> None:
        """Raise Stop if a signal has arrived."""
        if self._name is not None:
            raise Stop(self._name)

    @contextmanager
    def installed(self) -> Iterator[None]:
        previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        for number in previous:
            signal.signal(number, self._arrived)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _arrived(self, number: int, _: FrameType | None) -> None:
        if self._name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._name = signal.Signals(number).name


@dataclass(frozen=True, kw_only=True)
class Paths:
    """Files of a run."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def skipped(self) -> Path:
        return self.root / "skipped"

    @property
    def report(self) -> Path:
        return self.root / "report.png"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def calibration(self) -> Path:
        return self.root / "gate_calibration.json"

    @property
    def dumps(self) -> Path:
        return self.root / "dumps"

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    def clear(self) -> None:
        """Delete what a run writes, and nothing else that may lie in the directory."""
        for path in (self.checkpoints, self.skipped, self.model, self.dumps, self.weights, self.tensorboard):
            shutil.rmtree(path, ignore_errors=True)
        for path in (self.metrics, self.report, self.calibration, self.config):
            path.unlink(missing_ok=True)


@dataclass(frozen=True, kw_only=True)
class Run:
    """An opened run, at the step it starts from."""

    config: TrainConfig
    paths: Paths
    model: ModelConfig
    model_path: Path
    codec: TextCodec
    task: Task
    engine: Engine
    learner: Learner
    mesh: jax.sharding.Mesh
    checkpoints: Checkpoints
    log: MetricLog
    state: LearnerState
    cursor: int
    """Problems consumed so far, over-long ones included"""

    @property
    def step(self) -> int:
        return int(self.state.step)

    def export(self, params: Params) -> None:
        """Write the policy in BF16 as a Hugging Face directory."""
        save_model(self.paths.model, params, self.model, tokenizer_from=self.model_path, overwrite=True)


@contextmanager
def open_run(config: TrainConfig, *, resume: bool = False) -> Iterator[Run]:
    """Open or resume the run at `config.out`; raises ConfigError, ModelError or DataError before training."""
    paths = Paths(root=Path(config.out))
    saved = _claim(paths, config, resume=resume)
    with ExitStack() as stack:
        stack.enter_context(_locked(paths.root))
        model_path = resolve_model(config.model.path)
        with _reported("model.path"):
            codec = load_tokenizer(model_path)
        model = load_config(model_path, quantized=True)
        _check_context(config, model)
        _check_routing(config, model)
        _check_executions(config, model)
        params, _ = _load_policy(model_path)
        with _reported("task"):
            task = _open_task(config, stack)
        learner = make_learner(config, model)
        with _reported("learner"):
            mesh = make_mesh(config.learner.mesh)
        if config.numerics.learner.execution == "te":
            stack.enter_context(te_mesh(mesh))
        checkpoints = Checkpoints(paths.checkpoints, config.checkpoint.keep)
        stack.callback(checkpoints.close)

        state = _place(init_state(learner, params), mesh)
        restored = checkpoints.restore(state) if resume else None
        kept = int(restored[0].step) if restored else -1
        state, progress = restored or (state, {"cursor": 0})
        step = int(state.step)
        checkpoints.discard_after(step)

        log = MetricLog(paths.metrics, _trackers(config, paths, step), keep_steps=kept if resume else None)
        stack.callback(log.close)
        if saved != to_dict(config):
            write_atomically(paths.config, yaml.safe_dump(to_dict(config), sort_keys=False))
        engine = _open_engine(config, model, model_path, paths)
        stack.callback(engine.close)
        _check_engine(config, engine)
        # Also after a resume: the first sample must come from the restored weights, not from the base model.
        engine.update_weights(state.params, step)
        yield Run(
            config=config,
            paths=paths,
            model=model,
            model_path=model_path,
            codec=codec,
            task=task,
            engine=engine,
            learner=learner,
            mesh=mesh,
            checkpoints=checkpoints,
            log=log,
            state=state,
            cursor=int(progress["cursor"]),
        )


def make_learner(config: TrainConfig, model: ModelConfig) -> Learner:
    return Learner(
        model=model,
        numerics=config.numerics.learner,
        objective=config.objective,
        optimizer=config.optimizer,
        settings=config.learner,
        temperature=config.rollout.temperature,
        seed=config.seed,
    )


def resolve_model(path: str) -> Path:
    """The directory meant by `model.path`; raises ConfigError if it is none."""
    if path == QUICKSTART:
        return Path(str(files("triage_jax"))) / "assets" / "quickstart"
    directory = Path(path).expanduser()
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"model.path: {directory} holds no config.json; a Hugging Face directory of a Qwen3 or Llama model "
            f"is needed, or `{QUICKSTART}`"
        )
    return directory


def place_batch[Tree](batch: Tree, mesh: jax.sharding.Mesh) -> Tree:
    """Rows of a host batch over the devices of the mesh."""
    return jax.device_put(batch, batch_sharding(mesh))


def _place(state: LearnerState, mesh: jax.sharding.Mesh) -> LearnerState:
    return jax.device_put(state, parameter_shardings(state, mesh))


def _claim(paths: Paths, config: TrainConfig, *, resume: bool) -> dict[str, Any] | None:
    """Create the directory, or check that resuming it is possible; returns the configuration it was started with."""
    if not paths.config.exists():
        paths.root.mkdir(parents=True, exist_ok=True)
        return None
    if not resume:
        raise ConfigError(
            f"{paths.root} already holds a run: pass --resume to continue it, --overwrite to start it anew, "
            "or another --out"
        )
    saved = load_yaml(paths.config)
    before, after = (
        flatten(to_dict(from_dict(TrainConfig, saved, str(paths.config)))),
        flatten(to_dict(config)),
    )
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    refused = sorted(key for key in changed if not key.startswith(MAY_CHANGE) or key == "learner.remat")
    if refused:
        lines = "\n".join(f"  {key}: {before.get(key)!r} -> {after.get(key)!r}" for key in refused)
        raise ConfigError(
            f"{paths.root} was started with another configuration; these fields cannot change on --resume:\n"
            f"{lines}\nSet them back, or start a new run with another --out."
        )
    return saved


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """One process per run directory; the lock goes with the process, however it ends."""
    with (root / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"{root}: another process is training here; wait for it or choose another --out"
            ) from None
        yield


@contextmanager
def _reported(field: str) -> Iterator[None]:
    """What a part refuses is the configuration's fault here, and named as such."""
    try:
        yield
    except DataError:
        raise
    except (ValueError, FileNotFoundError) as error:
        raise ConfigError(f"{field}: {error}") from error


def _check_executions(config: TrainConfig, model: ModelConfig) -> None:
    """Before any weight is loaded: what this machine cannot execute."""
    rollout, settings = config.rollout, config.learner
    learner, sampler = config.numerics.learner, config.numerics.sampler
    rows = settings.micro_batch or rollout.rows
    with _reported("numerics"):
        check_execution(
            learner.execution,
            model,
            learner,
            tokens=rows * (rollout.max_prompt_tokens + rollout.max_new_tokens),
            devices=settings.mesh.data * settings.mesh.fsdp,
        )
        for side in (learner, sampler):
            check_count(side.expert_scopes, model.num_experts)
        if rollout.engine == "local" and sampler.execution not in ("float32", "bf16", "emulated"):
            raise ValueError(
                f"sampler.execution is {sampler.execution!r}; the local engine accepts float32, bf16, emulated"
            )


def _load_policy(path: Path) -> tuple[Params, ModelConfig]:
    """Float32 weights; of an NVFP4 checkpoint the numbers that its codes stand for."""
    quantized = read_json(path / "config.json").get("quantization_config") is not None
    return load_dequantized(path) if quantized else load_model(path)


def _check_routing(config: TrainConfig, model: ModelConfig) -> None:
    if config.rollout.replay_routing and not model.num_experts:
        raise ConfigError(
            "rollout.replay_routing = True: the model is dense and routes nothing; accepted: False"
        )


def _check_context(config: TrainConfig, model: ModelConfig) -> None:
    width = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    if width > model.max_position_embeddings:
        raise ConfigError(
            f"rollout.max_prompt_tokens + rollout.max_new_tokens = {width}; "
            f"the model's context holds {model.max_position_embeddings}"
        )


def _check_engine(config: TrainConfig, engine: Engine) -> None:
    """Both log-probabilities must belong to the same distribution, or the gap would be an artefact."""
    temperature = config.rollout.temperature
    if temperature != 1.0 and not engine.capabilities.logprobs_follow_temperature:
        raise ConfigError(
            f"rollout.temperature = {temperature}, and the engine ({engine.capabilities.description}) returns "
            "log-probabilities at temperature 1 whatever the sampling; accepted: rollout.temperature = 1"
        )


def _open_engine(config: TrainConfig, model: ModelConfig, model_path: Path, paths: Paths) -> Engine:
    if config.rollout.engine == "local":
        return LocalEngine(model, config.numerics.sampler, config.rollout.local)
    settings = config.rollout.sglang
    directory = Path(settings.weights_dir).expanduser() if settings.weights_dir else paths.weights
    with _reported("rollout.sglang"):
        return SglangEngine(settings, model, config.numerics.learner, directory, tokenizer_from=model_path)


def _open_task(config: TrainConfig, stack: ExitStack) -> Task:
    if config.task.name == "arithmetic":
        return ArithmeticTask(config.task.arithmetic)
    return stack.enter_context(JsonlTask(config.task.jsonl))


def _trackers(config: TrainConfig, paths: Paths, step: int) -> list[Tracker]:
    trackers: list[Tracker] = []
    if config.track.tensorboard:
        trackers.append(TensorBoard(paths.tensorboard, resume_at=step + 1 if step else None))
    if config.track.wandb_project:
        trackers.append(WeightsAndBiases(config.track.wandb_project, paths.root, to_dict(config)))
    return trackers
