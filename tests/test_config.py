"""Configuration: YAML, flags, errors that name the place, and nothing silently ignored."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from triage_jax.cli import packaged_config, parse
from triage_jax.config import ConfigError, TrainConfig, flatten, from_dict, load_yaml, to_dict
from triage_jax.model.presets import PRESETS

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


def _written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return str(path)


def test_no_arguments_is_the_quickstart():
    invocation = parse([])
    assert invocation.config == from_dict(TrainConfig, load_yaml(packaged_config("quickstart.yaml")), "q")
    assert (invocation.resume, invocation.overwrite, invocation.dry_run) == (False, False, False)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_configuration_is_valid(path):
    parse(["--config", str(path)])


def test_flags_override_the_file(tmp_path):
    path = _written(tmp_path, "steps: 7\noptimizer: {learning_rate: 1e-5}\nrollout:\n  temperature: 1\n")
    for arguments in (["--config", path], [f"--config={path}"]):
        config = parse([*arguments, "--steps", "9", "--objective.gate.scope", "whole"]).config
        assert config.steps == 9
        assert config.optimizer.learning_rate == 1e-5
        assert config.rollout.temperature == 1.0
        assert config.objective.gate.scope == "whole"


def test_a_configuration_survives_the_round_trip():
    config = parse(["--task.arithmetic.operations", "+", "-", "--objective.repair.target", "-0.1"]).config
    assert from_dict(TrainConfig, yaml.safe_load(yaml.safe_dump(to_dict(config))), "x") == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "optimizer: {learning_rte: 1}",
            r"run.yaml: optimizer.learning_rte: unknown field; did you mean "
            r"optimizer.learning_rate\?",
        ),
        ("stepps: 3", r"run.yaml: stepps: unknown field; did you mean steps\?"),
        ("zzz: 3", r"run.yaml: zzz: unknown field; accepted here: out, steps"),
        ("steps: many", r"run.yaml: steps: 'many' is not accepted; a value of: int"),
        ("steps: true", r"steps: True is not accepted; a value of: int"),
        (
            "optimizer: {learning_rate: fast}",
            r"optimizer.learning_rate: 'fast' is not accepted; a value of: float",
        ),
        (
            "objective: {gate: {scope: q2}}",
            r"objective.gate.scope: 'q2' is not accepted; a value of: 'q3', 'whole'",
        ),
        ("objective: 3", r"objective: a mapping of fields is needed, found 3"),
        ("task: {jsonl: {files: data.jsonl}}", r"task.jsonl.files: 'data.jsonl' is not accepted"),
        ("rollout: {temperature: 0}", r"temperature is 0.0; training needs a positive one"),
        ("learner: {micro_batch: 7}", r"micro_batch = 7 does not divide the 256 responses"),
        ("learner: {mesh: {data: 3}}", r"256 rows per micro-batch do not divide over the 3 devices"),
        (
            "numerics: {learner: {weight: {tile: 16x16, scope: row}}}",
            r"numerics.learner.weight.*scope 'row' needs",
        ),
        ("- 1", r"run.yaml: a mapping of fields is needed, found list"),
        ("a: [", r"(?s)run.yaml: not valid YAML: .*line 1"),
    ],
)
def test_a_bad_file_is_refused_with_the_place(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        parse(["--config", _written(tmp_path, text)])


def test_a_missing_file():
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read: No such file"):
        parse(["--config", "nowhere.yaml"])


def test_yaml_cannot_build_objects(tmp_path):
    with pytest.raises(ConfigError, match="not valid YAML"):
        parse(["--config", _written(tmp_path, "out: !!python/object/apply:os.getcwd []")])


def test_an_unknown_flag_ends_with_status_2_and_a_suggestion(capsys):
    with pytest.raises(SystemExit) as raised:
        parse(["--optimizer.learing-rate", "1"])
    assert raised.value.code == 2
    assert "--optimizer.learning-rate" in capsys.readouterr().err


def test_resume_and_overwrite_exclude_each_other():
    with pytest.raises(ConfigError, match="choose one"):
        parse(["--resume", "--overwrite"])


def test_every_field_is_reachable_as_a_flag_and_has_help(capsys):
    with pytest.raises(SystemExit) as raised:
        parse(["--help"])
    assert raised.value.code == 0
    printed = capsys.readouterr().out
    for name in flatten(to_dict(TrainConfig())):
        flag = name.replace("_", "-")
        negated = ".no-".join(flag.rsplit(".", 1))
        assert f"--{flag}" in printed or f"--{negated}" in printed, name


def test_flatten_names_nested_fields():
    assert flatten({"a": {"b": 1, "c": {"d": 2}}, "e": 3}) == {"a.b": 1, "a.c.d": 2, "e": 3}


def test_every_section_is_frozen():
    config = TrainConfig()
    for item in dataclasses.fields(config):
        section = getattr(config, item.name)
        if dataclasses.is_dataclass(section):
            first = dataclasses.fields(section)[0].name
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(section, first, None)


def test_a_recipe_by_name_and_what_differs_from_it(tmp_path):
    sampler = "{preset: sglang_per_token, activation: {tile: 1x16}, router: bf16}"
    text = f"numerics:\n  learner: te_default\n  sampler: {sampler}\n"
    numerics = parse(
        ["--config", _written(tmp_path, text), "--numerics.learner.layers", "mlp"]
    ).config.numerics
    assert numerics.learner == dataclasses.replace(PRESETS["te_default"], layers="mlp")
    assert numerics.sampler == dataclasses.replace(PRESETS["sglang_per_token"], router="bf16")
    with pytest.raises(
        ConfigError, match=r"numerics.learner: 'te_defualt' is no recipe; accepted: bf16, te_default"
    ):
        parse(["--config", _written(tmp_path, "numerics: {learner: te_defualt}")])


def test_files_are_laid_over_each_other(tmp_path):
    first = _written(tmp_path, "steps: 7\nrollout: {temperature: 0.5, max_new_tokens: 9}\n")
    second = tmp_path / "second.yaml"
    second.write_text("rollout: {temperature: 0.7}\n")
    config = parse(["--config", first, f"--config={second}", "--steps", "8"]).config
    assert (config.steps, config.rollout.temperature, config.rollout.max_new_tokens) == (8, 0.7, 9)
    second.write_text("rolout: {temperature: 0.7}\n")
    with pytest.raises(ConfigError, match=r"run.yaml \+ .*second.yaml: rolout: unknown field"):
        parse(["--config", first, "--config", str(second)])


def test_an_unknown_objective_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(
        ConfigError, match=r"command line: objective 'bapoo' is not known; accepted: grpo, dr_grpo"
    ):
        parse(["--objective.name", "bapoo"])
    with pytest.raises(ConfigError, match=r"run.yaml: the whole: objective 'bapoo' is not known"):
        parse(["--config", _written(tmp_path, "objective: {name: bapoo}")])
