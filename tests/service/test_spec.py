"""The spec: what is let in, what is refused and with which line, and its documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from search_spaces.engines import ENGINES
from search_spaces.hardware import ACCELERATORS, NETWORKS
from search_spaces.layout import AXES, SCHEDULES
from search_spaces.models import PRESETS
from search_spaces.workload import Workload
from service.axes import AUTO, SpaceSpec
from service.checks import check_data, data_from_afar
from service.errors import InputError
from service.goals import Limit, parse_constraint
from service.jobs import submit
from service.metrics import METRICS
from service.problem import Interconnect, Problem
from service.spec import SECTIONS, USUAL_LENGTH, SearchSpec, dump_spec, load_spec, make_problem, parse_spec

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
LEFT_OUT = object()
SHAPE = {"family": "llama", "layers": 2, "hidden": 64, "heads": 4, "ffn_hidden": 128, "vocab": 512}


def fields(**changes: Any) -> dict[str, Any]:
    values = {
        "name": "a-search",
        "model": "tiny-llama",
        "data": "synthetic",
        "sequence_length": 128,
        "global_batch_size": 16,
        "cluster": {"gpus_per_node": 4, "accelerator": "cpu"},
        "space": {},
    }
    return {name: value for name, value in (values | changes).items() if value is not LEFT_OUT}


def spec(**changes: Any) -> Problem:
    return parse_spec(yaml.safe_dump(fields(**changes)))


def refusal(text: str) -> str:
    with pytest.raises(InputError) as error:
        parse_spec(text, "a.yaml")
    line = str(error.value)
    assert line.startswith("a.yaml: ")
    assert len(line.splitlines()) == 1
    return line.removeprefix("a.yaml: ")


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * path.stem.startswith("gpt3_175b"))
        for path in EXAMPLES
    ],
)
def test_examples_load_and_find_their_data_from_anywhere(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = load_spec(path)
    assert len(spec.legal.layouts) >= 8
    assert max(point.num_gpus for point in spec.legal.layouts) <= spec.cluster.size
    prepared = path.parents[1] / ".wattune" / "data" / "demo"  # by `make setup`
    assert spec.data in (str(prepared), "synthetic") or spec.trainer is not None


def test_paths_in_a_file_begin_at_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "specs").mkdir()
    file = tmp_path / "specs" / "spec.yaml"
    for name, meant in (
        ("tokens", "specs/tokens"),
        ("../tokens.npy", "tokens.npy"),
        (str(tmp_path / "tokens"), "tokens"),
    ):
        file.write_text(yaml.safe_dump(fields(data=name)))
        assert load_spec("specs/spec.yaml").data == str(tmp_path / meant)
    file.write_text(yaml.safe_dump(fields(data="~/tokens")))
    assert load_spec(file).data == str(Path("~/tokens").expanduser())
    file.write_text(yaml.safe_dump(fields(data="synthetic")))
    assert load_spec(file).data == "synthetic"


def test_paths_in_a_text_begin_at_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert spec(data="tokens").located().data == str(tmp_path / "tokens")


def test_there_are_examples() -> None:
    assert {"tiny_cpu", "llama3_8b_8xh200"} <= {path.stem for path in EXAMPLES}


def test_defaults() -> None:
    defaults = spec()
    assert defaults.goals.objectives == {
        "tokens_per_s": "maximize",
        "joules_per_token": "minimize",
        "throttle_ratio": "minimize",
    }
    assert [point.label for point in defaults.legal.layouts] == ["megatron 4gpu dp4 zero0 mbs1"]
    assert defaults.gang_size == 4


def test_three_lines_are_a_question() -> None:
    lines = "model: llama3-70b\nglobal_batch_size: 128\ncluster: {nodes: 8, gpus_per_node: 8, accelerator: h100}"
    asked = parse_spec(lines)
    assert (asked.name, asked.sequence_length, asked.data) == ("llama3-70b", 8192, None)
    assert parse_spec(dump_spec(asked)) == asked
    least = {"name": LEFT_OUT, "sequence_length": LEFT_OUT, "data": LEFT_OUT}
    assert spec(**least).sequence_length == 512  # as many as it has positions for
    assert spec(**least, model=SHAPE).name == "search"
    for refused in (lambda: check_data(asked), lambda: submit(asked, "http://nowhere", "http://nowhere")):
        with pytest.raises(InputError, match=r"^data: this field is required to train: the path of tokens, or"):
            refused()
    assert data_from_afar(asked) == [
        "data: none are named, which a search needs: the path of tokens, or synthetic for made-up ones"
    ]


def test_a_space_that_nobody_wrote_follows_from_model_and_cluster() -> None:
    for auto in (spec(space=LEFT_OUT), spec(space="auto")):
        assert auto.axes["pipeline_parallel_size"] == [1, 2, 4]
        assert set(auto.axes) == set(AXES)
        assert set(auto.why) <= set(AXES)
        assert len(auto.legal.layouts) > 10
        assert parse_spec(dump_spec(auto)) == auto
    assert spec(space={"tensor_parallel_size": 2}).axes["pipeline_parallel_size"] == [1]
    assert not spec(space={}).why


def test_what_is_stated_of_the_machines_reaches_the_workload() -> None:
    network = {"preset": "nvlink3_hdr", "node_gb_per_s": 400, "gpus_per_switch": 32, "oversubscription": 2.5}
    cluster = {"nodes": 16, "gpus_per_node": 8, "accelerator": "h100"}
    stated = {"network": network, "memory_gib": 94, "power_limit_w": 500}
    plain, changed = (spec(cluster=each, global_batch_size=128).workload for each in (cluster, cluster | stated))
    assert changed == replace(
        plain,
        accelerator=replace(
            ACCELERATORS["h100"],
            memory_gib=94,
            power_limit_w=500,
            link_bytes_per_s=NETWORKS["nvlink3_hdr"].link,
            network_bytes_per_s=50e9,
        ),
        gpus_per_switch=32,
        oversubscription=2.5,
    )
    assert plain == Workload(PRESETS["tiny-llama"], 128, 128, ACCELERATORS["h100"])


def test_a_network_may_be_a_presets_name() -> None:
    named, said = (spec(cluster=CLUSTER | {"network": network}) for network in ("roce_400g", {"preset": "roce_400g"}))
    assert named == said
    assert named.cluster.network == Interconnect(preset="roce_400g")


def test_layouts_must_fit_the_memory_that_is_stated() -> None:
    """8B parameters with their optimizer states take 128 GB, of which a GPU of eight holds 16."""
    found = [
        spec(
            model="llama3-8b",
            sequence_length=512,
            cluster={"gpus_per_node": 8, "accelerator": "gpu", "memory_gib": gib},
            space={"zero_stage": [2, 3], "micro_batch_size": 1, "recompute": "full"},
        ).legal
        for gib in (30, 200)
    ]
    assert [legal.refused for legal in found] == [{"memory_fits": 1}, {}]


def test_one_value_stands_for_a_list_and_values_given_twice_count_once() -> None:
    assert spec(space={"zero_stage": 3}).axes["zero_stage"] == [3]
    assert spec(space={"zero_stage": [3, 0, 3]}).axes["zero_stage"] == [3, 0]


def test_a_gang_is_as_large_as_the_largest_layout() -> None:
    assert spec(space={"num_gpus": [1, 2]}).gang_size == 2


def test_key_value_heads_default_to_heads() -> None:
    assert spec(model=SHAPE).workload.shape.kv_heads == 4
    assert spec(model={**SHAPE, "kv_heads": 2}).workload.shape.kv_heads == 2


def test_heads_share_the_width_of_the_model_by_default() -> None:
    """So they do in what was recorded before they could be wider."""
    plain = spec(model=SHAPE)
    assert plain.workload.shape.head_dim == 16
    assert "head_dim" not in SHAPE
    assert spec(model={**SHAPE, "head_dim": 16}) == spec(model={**SHAPE, "head_dim": None}) == plain
    wide = spec(model={**SHAPE, "hidden": 66, "head_dim": 24})
    assert wide.workload.shape.query_width == 96
    assert parse_spec(dump_spec(wide)) == wide


def test_llama_knows_no_longest_sequence() -> None:
    assert spec(model="tiny-llama", sequence_length=4096).sequence_length == 4096


@pytest.mark.parametrize(
    ("given", "values"),
    [
        (None, [None]),
        ([1, 3], [(1, 3)]),
        ([[1, 3], [3, 1], [1, 3]], [(1, 3), (3, 1)]),
        ([None, [2, 2]], [None, (2, 2)]),
    ],
)
def test_axes_of_lists(given: Any, values: list[Any]) -> None:
    uneven = spec(space={"pipeline_parallel_size": 2, "stage_layers": given})
    assert uneven.axes["stage_layers"] == values
    assert {point.stage_layers for point in uneven.legal.layouts} == {None if v == (2, 2) else v for v in values}
    assert parse_spec(dump_spec(uneven)) == uneven


def test_rank_orders_of_several_sizes() -> None:
    ordered = spec(space={"num_gpus": [2, 4], "rank_order": [None, [1, 0], [0, 1, 3, 2], [0, 1]]})
    assert sorted(str(layout.rank_order) for layout in ordered.legal.layouts) == [
        "(0, 1, 3, 2)",
        "(1, 0)",
        "None",
        "None",
    ]


def test_proxies_are_the_model_with_fewer_layers() -> None:
    whole = spec(depth_proxy=[1, 2], model={**SHAPE, "layers": 8, "num_experts": 4, "family": "llama"})
    assert whole.legal.layouts
    half = whole.at_depth(2)
    assert half.shape == replace(whole.workload.shape, layers=2)
    assert replace(half, shape=whole.shape, depth_proxy=(1, 2)) == whole
    assert parse_spec(dump_spec(whole)) == whole


def test_proxies_let_models_be_tried_that_do_not_fit() -> None:
    cluster = {"gpus_per_node": 4, "accelerator": "h100"}
    assert spec(model="llama3-70b", cluster=cluster, depth_proxy=[1, 2], space={"zero_stage": 3}).legal.layouts
    line = refusal(yaml.safe_dump(fields(model="llama3-70b", cluster=cluster, depth_proxy=[1, 6])))
    assert re.match(r"space: no legal layout among 1; memory_fits refused 1 \(needs 136 GiB", line)


def test_virtual_stages_that_do_not_divide_a_proxy_are_refused_one_by_one() -> None:
    interleaved = {"pipeline_schedule": "interleaved_1f1b", "virtual_pipeline_stages": [2, 4]}
    found = spec(
        model={**SHAPE, "layers": 16}, depth_proxy=[4, 8], space={"pipeline_parallel_size": 2, **interleaved}
    ).legal
    assert [point.virtual_pipeline_stages for point in found.layouts] == [2]
    assert found.refused == {"layers_divide": 1}


def test_numbers_that_yaml_takes_for_text() -> None:
    """YAML 1.1 wants a dot in a number with an exponent."""
    assert (
        parse_spec(yaml.safe_dump(fields()) + "measurement: {warmup_tolerance: 5e-2}").measurement.warmup_tolerance
        == 0.05
    )


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("peak_memory_gib<=70", Limit("peak_memory_gib", "<=", 70.0, "")),
        (" mfu >= 4.5e-1 ", Limit("mfu", ">=", 0.45, "")),
        ("mean_power_w<=-1", Limit("mean_power_w", "<=", -1.0, "")),
    ],
)
def test_constraints(text: str, limit: Limit) -> None:
    assert parse_constraint(text) == limit
    assert spec(constraints=[text]).goals.limits == (limit,)


METRIC_LIST = "known: tokens_per_s, tokens_per_s_per_gpu, mfu, .* and [0-9]+ more"
PRESET_LIST = "one of gpt3-1.3b, .* tiny-gpt, or an inline shape"
CLUSTER = {"gpus_per_node": 4, "accelerator": "cpu"}

# Changes to a good spec, and what the line must say.
REFUSED: list[tuple[dict[str, Any], str]] = [
    # Unknown and missing fields
    (
        {"budjet": {}},
        r"budjet: unknown field; allowed: name, model, data, .* budget, .*sampler, seed, depth_proxy, borderline$",
    ),
    (
        {"sequence_lenght": 1, "sequence_length": LEFT_OUT},
        r"sequence_lenght: unknown field; allowed: .*sequence_length",
    ),
    ({"cluster": {**CLUSTER, "gpus": 8}}, r"cluster\.gpus: unknown field; allowed: nodes, gpus_per_node, acc"),
    ({"cluster": {**CLUSTER, "network": {"gb": 8}}}, r"cluster\.network\.gb: unknown field; allowed: preset, gpu_gb_p"),
    ({"space": {"tp": [1]}}, r"space\.tp: unknown field; allowed: engine, num_gpus, .*tensor_parallel_size"),
    ({"measurement": {"window": 1}}, r"measurement\.window: unknown field; allowed: .*window_s"),
    ({"budget": {"hours": 1}}, r"budget\.hours: unknown field; allowed: trials, wall_time_s, gpu_hours$"),
    ({"model": {**SHAPE, "depth": 1}}, r"model\.depth: unknown field; allowed: family, layers, hidden"),
    ({"two\nlines": 1}, r"two lines: unknown field"),
    ({"model": LEFT_OUT}, r"model: this field is required$"),
    ({"global_batch_size": LEFT_OUT}, r"global_batch_size: this field is required$"),
    ({"cluster": {"accelerator": "cpu"}}, r"cluster\.gpus_per_node: this field is required$"),
    ({"model": {"family": "gpt"}}, r"model\.layers: this field is required$"),
    # Wrong types
    ({"name": 3}, r"name: must be a valid string \(given: 3\)$"),
    ({"name": "a b"}, r"name: must be letters, digits, .* \(given: \"a b\"\)$"),
    ({"name": "x" * 64}, r"name: must be letters, digits, .* at most 63"),
    ({"name": "two\nlines"}, r"name: must be letters"),
    ({"data": ""}, r"data: must not be empty"),
    ({"sequence_length": "128"}, r"sequence_length: must be a valid integer \(given: \"128\"\)$"),
    ({"sequence_length": 1.5}, r"sequence_length: must be a valid integer \(given: 1\.5\)$"),
    ({"sequence_length": True}, r"sequence_length: must be a valid integer \(given: true\)$"),
    ({"sequence_length": 0}, r"sequence_length: must be greater than or equal to 1 \(given: 0\)$"),
    ({"global_batch_size": -4}, r"global_batch_size: must be greater than or equal to 1"),
    ({"global_batch_size": 8 * 10**30}, r"global_batch_size: must be less than or equal to 1000000000000 \(given: 8"),
    ({"global_batch_size": 10**400}, r"global_batch_size: must be .* \(given: 1(0{79})\.\.\.\)$"),
    ({"global_batch_size": float("nan")}, r"global_batch_size: must be a valid integer \(given: NaN\)"),
    ({"cluster": 4}, r"cluster: must be a mapping with the fields nodes, gpus_per_node, .* \(given: 4\)$"),
    ({"cluster": {**CLUSTER, "network": 4}}, r"cluster\.network: must be a mapping with the fields preset, .*: 4\)$"),
    (
        {"cluster": {**CLUSTER, "network": "token ring"}},
        r"cluster\.network\.preset: must be 'nvlink4_ndr', .* or 'infinity_fabric4' \(given: \"token ring\"\)$",
    ),
    (
        {"cluster": {**CLUSTER, "network": {"node_gb_per_s": 0}}},
        r"cluster\.network\.node_gb_per_s: must be greater than 0 \(given: 0\)$",
    ),
    (
        {"cluster": {**CLUSTER, "network": {"gpus_per_switch": 8, "oversubscription": 0.5}}},
        r"cluster\.network\.oversubscription: must be greater than or equal to 1",
    ),
    (
        {"cluster": {**CLUSTER, "network": {"oversubscription": 2}}},
        r"cluster\.network: oversubscription 2 needs gpus_per_switch, the GPUs below which there is none$",
    ),
    (
        {"cluster": {**CLUSTER, "network": {"gpus_per_switch": 6}}},
        r"cluster: network\.gpus_per_switch 6 must be a multiple of gpus_per_node 4$",
    ),
    (
        {"cluster": {**CLUSTER, "memory_gib": 80}},
        r"cluster: memory_gib is that of a GPU, not of a worker process on cpu$",
    ),
    ({"cluster": {**CLUSTER, "power_limit_w": True}}, r"cluster\.power_limit_w: must be a number \(given: true\)$"),
    ({"cluster": []}, r"cluster: must be a mapping with the fields nodes, gpus_per_node"),
    ({"space": None}, r"space: must be auto, or a mapping with the fields engine, .* \(given: null\)$"),
    ({"space": "all"}, r"space: must be auto, or a mapping with the fields engine, .* \(given: \"all\"\)$"),
    ({"budget": 3}, r"budget: must be a mapping with the fields trials"),
    ({"seed": True}, r"seed: must be a valid integer \(given: true\)$"),
    ({"budget": {4: 5}}, r"budget\.4: a field's name must be text$"),
    ({"baseline": [1]}, r"baseline: must be a mapping of axis to value$"),
    (
        {"space": {"pipeline_parallel_size": 2, "virtual_pipeline_stages": 10**12, "pipeline_schedule": "gpipe"}},
        r"space\.pipeline_schedule: gpipe: ",
    ),
    (
        {
            "space": {
                "pipeline_parallel_size": 2,
                "virtual_pipeline_stages": 10**12,
                "pipeline_schedule": "interleaved_1f1b",
            }
        },
        r"space: no legal layout among 1; layers_divide refused 1 ",
    ),
    ({"seed": -1}, r"seed: must be greater than or equal to 0"),
    ({"seed": 2**32}, r"seed: must be less than 4294967296"),
    (
        {"sampler": "grid"},
        r"sampler: must be 'auto', 'gp', 'tpe', 'nsga2', 'random' or 'exhaustive' \(given: \"grid\"\)$",
    ),
    (
        {"baseline": {"layers": 2}},
        r"baseline\.layers: unknown axis; must be one of engine, num_gpus, .*power_limit_w$",
    ),
    ({"baseline": {"micro_batch_size": 3}}, r"baseline: none of the \d+ legal layouts is like that$"),
    (
        {"baseline": {"engine": "megatron"}, "space": {"micro_batch_size": [1, 2], "recompute": ["none", "full"]}},
        r"baseline: 4 legal layouts are like that; name micro_batch_size, recompute too$",
    ),
    # Amounts
    ({"measurement": {"window_s": True}}, r"measurement\.window_s: must be a number \(given: true\)$"),
    ({"measurement": {"window_s": float("inf")}}, r"measurement\.window_s: must be a finite number"),
    ({"measurement": {"window_s": float("nan")}}, r"measurement\.window_s: must be"),
    ({"measurement": {"window_s": -1}}, r"measurement\.window_s: must be greater than 0 \(given: -1\)$"),
    ({"measurement": {"window_s": "soon"}}, r"measurement\.window_s: must be a valid number"),
    ({"measurement": {"warmup_tolerance": 2}}, r"measurement\.warmup_tolerance: must be less than 1"),
    ({"measurement": {"steady_steps": 1}}, r"measurement\.steady_steps: must be greater than or equal to 2"),
    ({"budget": {"trials": 0}}, r"budget\.trials: must be greater than or equal to 1"),
    ({"budget": {"gpu_hours": float("inf")}}, r"budget\.gpu_hours: must be a finite number"),
    ({"cluster": {**CLUSTER, "cpus_per_worker": float("nan")}}, r"cluster\.cpus_per_worker: must be"),
    # Model
    ({"model": "gpt-9"}, rf"model: unknown model 'gpt-9'; must be {PRESET_LIST}$"),
    ({"model": 3}, rf"model: must be {PRESET_LIST} with the fields family, .* \(given: 3\)$"),
    ({"model": ["tiny-llama"]}, rf"model: must be {PRESET_LIST}"),
    ({"model": None}, rf"model: must be {PRESET_LIST}"),
    ({"model": {**SHAPE, "family": "bert"}}, r"model\.family: must be 'llama' or 'gpt' \(given: \"bert\"\)$"),
    ({"model": {**SHAPE, "layers": "two"}}, r"model\.layers: must be a valid integer"),
    ({"model": {**SHAPE, "layers": 10**9}}, r"model\.layers: must be less than or equal to 100000 "),
    ({"model": {**SHAPE, "hidden": 66}}, r"model: hidden 66 must be an even multiple of heads 4$"),
    ({"model": {**SHAPE, "hidden": 60}}, r"model: hidden 60 must be an even multiple of heads 4$"),
    ({"model": {**SHAPE, "head_dim": 15}}, r"model: head_dim 15 must be even$"),
    ({"model": {**SHAPE, "head_dim": 0}}, r"model\.head_dim: must be greater than or equal to 1 \(given: 0\)$"),
    ({"model": {**SHAPE, "kv_heads": 3}}, r"model: heads 4 must be a multiple of kv_heads 3$"),
    ({"model": {**SHAPE, "rope_theta": float("nan")}}, r"model\.rope_theta: must be"),
    ({"model": {**SHAPE, "tie_embeddings": "yes"}}, r"model\.tie_embeddings: must be a valid boolean"),
    ({"model": "tiny-gpt", "sequence_length": 513}, r"sequence_length: 513 exceeds the model's 512 positions$"),
    # Cluster
    (
        {"cluster": {**CLUSTER, "accelerator": "tpu"}},
        r"cluster\.accelerator: must be 'h100', .* or 'cpu' \(given: \"tpu\"\)",
    ),
    ({"cluster": {**CLUSTER, "nodes": 10**9}}, r"cluster: 1000000000 x 4 GPUs are more than 1,000,000, "),
    ({"cluster": {**CLUSTER, "nodes": 10**30}}, r"cluster\.nodes: must be less than or equal to 1000000000000 "),
    ({"space": {"num_gpus": [4, 8]}}, r"space\.num_gpus: 8 is more than the cluster's 4$"),
    # Objectives and constraints
    ({"objectives": {}}, r"objectives: must not be empty$"),
    ({"objectives": {"speed": "maximize"}}, rf"objectives\.speed: unknown metric; {METRIC_LIST}"),
    (
        {"objectives": {"token_per_s": "maximize"}},
        r"objectives\.token_per_s: unknown metric; did you mean tokens_per_s ",
    ),
    ({"objectives": {"memory": "minimize"}}, r"objectives\.memory: unknown metric; did you mean peak_memory_gib\?"),
    ({"objectives": {"mfu": "up"}}, r"objectives\.mfu: must be 'maximize' or 'minimize' \(given: \"up\"\)$"),
    ({"objectives": ["mfu"]}, r"objectives: must be a mapping of metric to maximize or minimize$"),
    ({"constraints": "mfu>=0.4"}, r"constraints: must be a valid list \(given: \"mfu>=0\.4\"\)$"),
    ({"constraints": ["speed>=3"]}, rf"constraints: unknown metric in 'speed>=3'; {METRIC_LIST}$"),
    ({"constraints": ["mfus>=0.3"]}, r"constraints: unknown metric in 'mfus>=0\.3'; did you mean mfu\?$"),
    ({"constraints": ["mfu<0.4"]}, r"constraints: 'mfu<0\.4' is not METRIC<=NUMBER or METRIC>=NUMBER"),
    ({"constraints": ["mfu<=high"]}, r"constraints: 'mfu<=high' is not METRIC<=NUMBER"),
    ({"constraints": ["mfu<=e"]}, r"constraints: 'e' in 'mfu<=e' is not a finite number$"),
    ({"constraints": ["mfu<=1e999"]}, r"constraints: '1e999' in 'mfu<=1e999' is not a finite number$"),
    ({"constraints": [3]}, r"constraints: must be a valid string \(given: 3\)$"),
    # Axes
    ({"space": {"engine": "fsdp"}}, r"space\.engine: must be 'megatron' or 'deepspeed' \(given: \"fsdp\"\)$"),
    ({"space": {"zero_stage": [0, 4]}}, r"space\.zero_stage: must be less than or equal to 3 \(given: 4\)$"),
    ({"space": {"zero_stage": True}}, r"space\.zero_stage: must be a valid integer \(given: true\)$"),
    ({"space": {"zero_stage": []}}, r"space\.zero_stage: must not be empty$"),
    ({"space": {"zero_stage": None}}, r"space\.zero_stage: must be a valid integer \(given: null\)$"),
    ({"space": {"num_gpus": []}}, r"space\.num_gpus: must not be empty$"),
    ({"space": {"num_gpus": "all"}}, r"space\.num_gpus: must be a valid integer \(given: \"all\"\)$"),
    ({"space": {"micro_batch_size": {"a": 1}}}, r"space\.micro_batch_size: must be a valid integer$"),
    ({"space": {"bucket_size": 10**400}}, r"space\.bucket_size: must be less than or equal to 1000000000000 "),
    ({"space": {"compile": 1}}, r"space\.compile: must be a valid boolean \(given: 1\)$"),
    ({"space": {"recompute": "some"}}, r"space\.recompute: must be 'none', 'selective' or 'full' \(given: \"some\"\)"),
    (
        {"space": {"tensor_parallel_size": [1, 3]}},
        r"space\.tensor_parallel_size: 3: .* heads cannot be split .* allowed: 1, 2$",
    ),
    ({"space": {"tensor_parallel_size": 4}}, r"space\.tensor_parallel_size: 4: .* 2 key-value heads cannot be split"),
    (
        {"space": {"pipeline_parallel_size": 3}},
        r"space\.pipeline_parallel_size: 3: 4 layers cannot be .* 3 stages; allowed: 1, 2, 4$",
    ),
    (
        {"space": {"context_parallel_size": 3}},
        r"space\.context_parallel_size: 3: sequence of 128 .* 6 pieces; allowed: 1, 2, 4$",
    ),
    (
        {"space": {"expert_parallel_size": 2}},
        r"space\.expert_parallel_size: 2: a dense model has no experts to spread; allowed: 1$",
    ),
    (
        {"model": "tiny-moe", "space": {"expert_parallel_size": 3}},
        r"space\.expert_parallel_size: 3: 4 experts cannot be spread over 3 GPUs; allowed: 1, 2, 4$",
    ),
    (
        {"space": {"precision": ["bf16", "fp8"]}},
        r"space\.precision: fp8: the accelerator has no matrix units for fp8; allowed: bf16, fp32$",
    ),
    (
        {"space": {"pipeline_parallel_size": 2, "pipeline_schedule": ["1f1b", "zbv_zero_bubble"]}},
        r"space\.pipeline_schedule: zbv_zero_bubble: .* has two stages a rank, not 1; allowed: gpipe, 1f1b$",
    ),
    (
        {"space": {"pipeline_parallel_size": 2, "virtual_pipeline_stages": 2}},
        r"space\.pipeline_schedule: 1f1b: 1f1b has one stage a rank, not 2; allowed: interleaved_1f1b, .*$",
    ),
    (
        {"space": {"pipeline_parallel_size": [3, 2], "stage_layers": [1, 3]}},
        r"space\.pipeline_parallel_size: 3: 4 layers cannot be .* 3 stages; allowed: 1, 2, 4$",
    ),
    # Lists of lists
    (
        {"space": {"stage_layers": "1-3"}},
        r"space\.stage_layers: must be a list of whole numbers, .*\(given: \"1-3\"\)$",
    ),
    ({"space": {"stage_layers": 4}}, r"space\.stage_layers: must be a list of whole numbers, .* \(given: 4\)$"),
    ({"space": {"stage_layers": {"a": 1}}}, r"space\.stage_layers: must be a list of whole numbers, "),
    (
        {"space": {"stage_layers": [[1, 3], 4]}},
        r"space\.stage_layers: must be a list of whole numbers, .*\(given: 4\)$",
    ),
    ({"space": {"stage_layers": [1.5, 2.5]}}, r"space\.stage_layers: must be a list of whole numbers, "),
    ({"space": {"stage_layers": [[1.5, 2.5]]}}, r"space\.stage_layers: must be a valid integer \(given: 1\.5\)$"),
    ({"space": {"stage_layers": [["a"]]}}, r"space\.stage_layers: must be a valid integer \(given: \"a\"\)$"),
    ({"space": {"stage_layers": [True, False]}}, r"space\.stage_layers: must be a valid integer \(given: true\)$"),
    ({"space": {"stage_layers": [0, 4]}}, r"space\.stage_layers: must be greater than or equal to 1 \(given: 0\)$"),
    ({"space": {"stage_layers": []}}, r"space\.stage_layers: must not be empty$"),
    ({"space": {"stage_layers": [[]]}}, r"space\.stage_layers: must not be empty$"),
    (
        {"space": {"pipeline_parallel_size": 2, "stage_layers": [[1, 2], [2, 2]]}},
        r"space\.stage_layers: \[1, 2\]: stage_layers must be 2 numbers above 0 that sum to 4$",
    ),
    (
        {"space": {"pipeline_parallel_size": [1, 2, 4], "stage_layers": [1, 1, 2]}},
        r"space\.stage_layers: \[1, 1, 2\]: stage_layers must be 2 numbers .*; or .* 4 numbers above 0 that sum to 4$",
    ),
    ({"space": {"stage_layers": [1, 3]}}, r"space\.stage_layers: \[1, 3\]: stage_layers must be 1 numbers"),
    ({"space": {"rank_order": [0, -1]}}, r"space\.rank_order: must be greater than or equal to 0 \(given: -1\)$"),
    (
        {"space": {"rank_order": [0, 1, 2, 2]}},
        r"space\.rank_order: \[0, 1, 2, 2\]: .* must name each of the 4 workers once$",
    ),
    (
        {"space": {"rank_order": [1, 2, 3, 4]}},
        r"space\.rank_order: \[1, 2, 3, 4\]: .* must name each of the 4 workers once$",
    ),
    (
        {"space": {"rank_order": [None, [1, 0]], "num_gpus": [1, 4]}},
        r"space\.rank_order: \[1, 0\]: .* each of the 1 workers once; or .* each of the 4 workers once$",
    ),
    # Depth proxies
    ({"depth_proxy": 2}, r"depth_proxy: must be a valid list \(given: 2\)$"),
    ({"depth_proxy": [2]}, r"depth_proxy: must be two numbers of layers$"),
    ({"depth_proxy": [1, 2, 3]}, r"depth_proxy: must be two numbers of layers$"),
    ({"depth_proxy": [1, "two"]}, r"depth_proxy: must be a valid integer \(given: \"two\"\)$"),
    ({"depth_proxy": [0, 2]}, r"depth_proxy: must be greater than or equal to 1"),
    ({"depth_proxy": [2, 2]}, r"depth_proxy: must be two numbers, ascending, below the model's 4 layers, not 2, 2$"),
    ({"depth_proxy": [2, 1]}, r"depth_proxy: must be two numbers, ascending, .* not 2, 1$"),
    ({"depth_proxy": [2, 4]}, r"depth_proxy: must be two numbers, ascending, below the model's 4 layers, not 2, 4$"),
    (
        {"depth_proxy": [1, 2], "space": {"pipeline_parallel_size": [1, 2]}},
        r"depth_proxy: 1 and 2 layers cannot both be split evenly over space\.pipeline_parallel_size 2$",
    ),
    (
        {"depth_proxy": [1, 2], "space": {"pipeline_parallel_size": [1, 2], "stage_layers": [None, [1, 3]]}},
        r"depth_proxy: uneven stages \(space\.stage_layers\) have no equal in a model of fewer layers$",
    ),
    # Nothing left
    (
        {"global_batch_size": 7},
        r"global_batch_size: no legal layout among 1; batch_divides refused 1 \(global batch 7 ",
    ),
    ({"space": {"micro_batch_size": 32}}, r"global_batch_size: no legal layout among 1; batch_divides refused 1"),
    (
        {"space": {"tensor_parallel_size": 2, "pipeline_parallel_size": 4}},
        r"space: no legal layout among 1; gpus_divide refused 1 \(4 GPUs are no multiple of .* 8\)$",
    ),
    (
        {"space": {"pipeline_parallel_size": 2, "zero_stage": [2, 3]}},
        r"space: no legal layout among 2; zero_with_pipeline refused 2",
    ),
    (
        {"model": "llama3-70b", "cluster": {"gpus_per_node": 4, "accelerator": "h100"}},
        r"space: no legal layout among 1; memory_fits refused 1 \(needs 1\d\d\d GiB of 78 GiB: .*\)$",
    ),
]


@pytest.mark.parametrize(("changes", "line"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_a_bad_field_is_refused_with_one_line(changes: dict[str, Any], line: str) -> None:
    assert re.match(line, refusal(yaml.safe_dump(fields(**changes))))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "a spec is a mapping with the fields name, model"),
        ("- name", "a spec is a mapping with the fields name, model"),
        ("just text", "a spec is a mapping with the fields name, model"),
        ("name: [a", r"not valid YAML at line 1, column 9: expected ',' or '\]'"),
        ("name: a\n\tmodel: b", "not valid YAML at line 2, column 1: found character"),
        ("name: a\nmodel: b: c", "not valid YAML at line 2, column 9: mapping values are not allowed here"),
        ("name: a\nmodel: b\nname: c", "not valid YAML at line 3, column 1: name is given twice"),
        (
            "space:\n  engine: megatron\n  engine: deepspeed",
            "not valid YAML at line 3, column 3: engine is given twice",
        ),
        ("name: *other", "not valid YAML at line 1, column 7: found undefined alias"),
        ("name: !!python/name:os.system", "not valid YAML at line 1, column 7: could not determine a constructor"),
        ("name: a\n---\nname: b", "not valid YAML at line 2, column 1: but found another document"),
        ("name: \0", "not valid YAML: unacceptable character"),
        ("name: " + "[" * 5000, "not valid YAML"),
        ("1: 2", "global_batch_size: this field is required"),
        ("a: !!timestamp soon", "not valid YAML at line 1, column 4: could not determine a constructor"),
    ],
)
def test_broken_yaml_is_refused_with_its_line(text: str, line: str) -> None:
    assert re.match(line, refusal(text))


@pytest.mark.parametrize(
    ("field", "line"),
    [
        ("space: {precision: no}", r"space\.precision: must be 'bf16', 'fp32' or 'fp8' \(given: \"no\"\)"),
        ("space: {recompute: off}", r"space\.recompute: must be 'none', 'selective' or 'full' \(given: \"off\"\)"),
        ("space: {zero_stage: [1,2,]}", None),
        ("space: {compile: True}", None),
        ("space: {compile: on}", r"space\.compile: must be a valid boolean \(given: \"on\"\)"),
        ("space: {compile: yes}", r"space\.compile: must be a valid boolean \(given: \"yes\"\)"),
        ("space:", r"space: must be auto, or a mapping .* \(given: null\)"),
        ("sampler: null", r"sampler: must be .* \(given: null\)"),
        ("seed: 010", r"seed: must be a valid integer \(given: \"010\"\)"),
        ("seed: 0x10", r"seed: must be a valid integer \(given: \"0x10\"\)"),
        ("seed: 1_000", r"seed: must be a valid integer \(given: \"1_000\"\)"),
        ("seed: +7", None),
        ("measurement: {window_s: 1:30}", r"measurement\.window_s: must be a valid number.* \(given: \"1:30\"\)"),
        ("measurement: {warmup_tolerance: .5}", None),
        ("seed: 1e3", r"seed: must be a valid integer \(given: \"1e3\"\)"),
        ("budget: {gpu_hours: .inf}", r"budget\.gpu_hours: must be a finite number"),
        ("constraints: [mfu>=0.4]", None),
    ],
)
def test_what_yaml_makes_of_words(field: str, line: str | None) -> None:
    text = yaml.safe_dump(fields(space=LEFT_OUT)) + field
    if line is None:
        parse_spec(text)
    else:
        assert re.match(line, refusal(text))


def test_a_name_that_looks_like_a_number_or_a_date_is_a_name() -> None:
    for name in ("010", "1_000", "2025-13-01", "on"):
        named = parse_spec(yaml.safe_dump(fields(name=LEFT_OUT)) + f"name: {name}")
        assert named.name == name
        assert parse_spec(dump_spec(named)) == named


def test_files_that_are_no_spec(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(bytes(range(256)))
    (tmp_path / "empty.yaml").touch()
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(fields(seed=-1)))
    for path, line in (
        (tmp_path / "nowhere.yaml", "cannot read the spec: No such file or directory"),
        (tmp_path, "cannot read the spec: Is a directory"),
        (tmp_path / "binary.yaml", "cannot read the spec: not a text file"),
        (tmp_path / "empty.yaml", "a spec is a mapping with the fields name"),
        (tmp_path / "bad.yaml", "seed: must be"),
    ):
        with pytest.raises(InputError) as error:
            load_spec(path)
        assert str(error.value).startswith(f"{path}: {line}")
        assert "\n" not in str(error.value)


def some(values: list[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.sampled_from(values), min_size=1, max_size=3)


valid = st.fixed_dictionaries(
    {
        "name": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True),
        "model": st.sampled_from(["tiny-llama", "tiny-gpt", SHAPE, {**SHAPE, "family": "gpt", "tie_embeddings": True}]),
        "data": st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1),
        "sequence_length": st.integers(1, 512),
        "global_batch_size": st.integers(1, 8).map(lambda n: 4 * n),
        "cluster": st.fixed_dictionaries(
            {"gpus_per_node": st.just(4), "accelerator": st.just("cpu")},
            optional={
                "network": st.sampled_from(list(NETWORKS))
                | st.fixed_dictionaries(
                    {"gpus_per_switch": st.integers(1, 8).map(lambda n: 4 * n)},
                    optional={"gpu_gb_per_s": st.floats(0.1, 1e4), "oversubscription": st.floats(1, 8)},
                )
            },
        ),
    },
    optional={
        "objectives": st.dictionaries(st.sampled_from(METRICS), st.sampled_from(["maximize", "minimize"]), min_size=1),
        "constraints": st.lists(
            st.builds(
                "{}{}{}".format,
                st.sampled_from(METRICS),
                st.sampled_from(["<=", ">="]),
                st.floats(allow_nan=False, allow_infinity=False),
            )
        ),
        "space": st.fixed_dictionaries(
            {},
            optional={
                "engine": some(["megatron", "deepspeed"]),
                "num_gpus": some([1, 2]).map(lambda sizes: [1, 4, *sizes]),
                "zero_stage": some([0, 1, 2, 3]),
                "recompute": some(list(AXES["recompute"].allowed or ())),
                "rank_order": some([None, [3, 2, 1, 0], [0, 1, 3, 2]]).map(lambda orders: [None, *orders]),
                "pipeline_schedule": some(list(SCHEDULES)),
                "compile": some([False, True]) | st.booleans(),
                "precision": st.sampled_from(["bf16", "fp32"]),
            },
        ),
        "measurement": st.fixed_dictionaries(
            {}, optional={"window_s": st.floats(0.01, 1e6), "steady_steps": st.integers(2)}
        ),
        "budget": st.fixed_dictionaries({}, optional={"trials": st.integers(1), "gpu_hours": st.floats(1e-9, 1e9)}),
        "sampler": st.sampled_from(["auto", "gp", "tpe", "nsga2", "random", "exhaustive"]),
        "seed": st.integers(0, 2**32 - 1),
    },
)


@settings(max_examples=60, deadline=None)
@given(valid)
def test_round_trip_through_yaml(values: dict[str, Any]) -> None:
    spec = make_problem(values)
    again = parse_spec(dump_spec(spec))
    assert again == spec
    assert again.legal == spec.legal
    assert again.goals == spec.goals


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
paths = st.sampled_from(
    [(n,) for n in SearchSpec.model_fields]
    + [(*s.split("."), n) for s in SECTIONS if s for n in SECTIONS[s].model_fields]
)


@settings(max_examples=150, deadline=None)
@given(paths, junk)
def test_junk_in_any_field_is_taken_or_refused_with_one_line(path: tuple[str, ...], value: Any) -> None:
    values = fields(model=dict(SHAPE))
    section = values
    for name in path[:-1]:
        section = section.setdefault(name, {})
    section[path[-1]] = value
    line = f"spec: {path[0]}: taken"
    try:
        parse_spec(yaml.safe_dump(values))
    except InputError as error:
        line = str(error)
    assert len(line.splitlines()) == 1
    assert re.match(rf"spec: ({'|'.join(SearchSpec.model_fields)})\b.*: ", line)


TITLES = {"The search": "", "In a spec": "trainer"}
"""Of sections of the documentation that are not called as those of a spec."""

WITHOUT_TRAINER = {("", "model")}
"""What is required where there is no trainer."""


DEFAULTS = {
    ("trainer", "directory"): "the file's folder",
    ("", "name"): "the model's",
    ("", "data"): "none",
    ("", "sequence_length"): str(USUAL_LENGTH),
}
"""Those that are not the fields' own."""


def documented() -> Iterator[tuple[str, str, str]]:
    """(section, field, default) of every row of the field tables in docs/spec.md and docs/trainers.md."""
    section = ""
    lines = "\n".join((ROOT / "docs" / name).read_text() for name in ("spec.md", "trainers.md"))
    for line in lines.splitlines():
        if line.startswith("## "):
            title = line.removeprefix("## ")
            section = TITLES.get(title, title)
        elif section in SECTIONS and (row := re.match(r"\| `(\w+)` \| [^|]+ \| ([^|]+) \| ", line)):
            yield section, row[1], row[2].strip("` ")


def default_of(field: FieldInfo) -> Any:
    default = field.get_default(call_default_factory=True)
    if field is SearchSpec.model_fields["space"]:  # where it is None, nobody chose
        return AUTO if default is None else default
    return {} if type(default) in SECTIONS.values() else default


def test_the_documentation_has_every_field_and_its_default() -> None:
    found = {(section, field): default for section, field, default in documented()}
    sections = [section for section in SECTIONS if not section.startswith("trainer.")]  # told in a row of the trainer's
    assert set(found) == {(section, field) for section in sections for field in SECTIONS[section].model_fields}
    for (section, name), told in found.items():
        field = SECTIONS[section].model_fields[name]
        if field.is_required() or (section, name) in WITHOUT_TRAINER:
            assert told == "required", name
        elif (section, name) in DEFAULTS:
            assert told == DEFAULTS[section, name]
        else:
            assert yaml.safe_load(told) == default_of(field), name


def test_the_space_has_every_axis_and_its_default() -> None:
    assert list(SpaceSpec.model_fields) == list(AXES)
    for name, values in SpaceSpec().model_dump().items():
        assert values == (None if name == "num_gpus" else [AXES[name].default])


def test_an_engine_is_looked_up_when_a_spec_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "another", ENGINES["megatron"])
    assert spec(space={"engine": "another"}).axes["engine"] == ["another"]
    line = refusal(yaml.safe_dump(fields(space={"engine": 3})))
    assert line == "space.engine: must be 'megatron', 'deepspeed' or 'another' (given: 3)"


def test_the_documented_axes_are_their_rows() -> None:
    rows = (ROOT / "docs" / "spec.md").read_text().partition("\n## space\n")[2].partition("\n## ")[0]
    table = [line for line in rows.splitlines() if line.startswith("| `")]
    assert table == [axis.documentation for axis in AXES.values()]


def test_the_documentation_names_every_choice() -> None:
    text = (ROOT / "docs" / "spec.md").read_text()
    sampler = get_args(SearchSpec.model_fields["sampler"].annotation)
    words = [*ENGINES, *(word for axis in AXES.values() if axis.type is str for word in axis.allowed or ())]
    assert [word for word in (*METRICS, *PRESETS, *ACCELERATORS, *sampler, *words) if f"`{word}`" not in text] == []


def test_the_worked_example_counts_as_it_says() -> None:
    text = (ROOT / "docs" / "spec.md").read_text()
    example = re.search(r"```yaml\n(.*?)```\n\n(.*?)\n\n", text, re.DOTALL)
    assert example
    space = parse_spec(example[1]).legal
    told = " ".join(example[2].split())
    assert f"= {space.combinations} combinations, of which {space.distinct} are different layouts" in told
    assert f"refuse {sum(space.refused.values())}, namely {space.refused['zero_with_pipeline']} pipelines" in told
    assert f"{space.refused['memory_fits']} that do not fit in memory; {len(space.layouts)} are legal" in told
    assert set(space.refused) == {"zero_with_pipeline", "memory_fits"}
