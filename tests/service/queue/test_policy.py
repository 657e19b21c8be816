from __future__ import annotations

from pathlib import Path

import pytest

from service.errors import InputError
from service.queue.policy import Policy, read_policy


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "policy.yaml"
    monkeypatch.setenv("WATTUNE_POLICY", str(path))
    return path


def test_a_cluster_without_a_file_has_the_default_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WATTUNE_POLICY", raising=False)
    assert read_policy() == Policy()
    assert Policy().quota("anybody") is None


def test_the_operators_file_says_how_searches_share_a_cluster(file: Path) -> None:
    file.write_text(
        "slice_minutes: 5\nexclusive: false\nquota: {period_days: 30, gpu_hours: {default: 10, ada: 0.5, eve: 0}}\n"
    )
    policy = read_policy()
    assert (policy.slice_s, policy.exclusive, policy.period_days) == (300, False, 30)
    assert [policy.quota(name) for name in ("ada", "eve", "bob")] == [0.5, 0, 10]
    assert policy.data is None
    file.write_text("data: []\n")
    assert read_policy().data == ()
    file.write_text("data: [/data/team, 's3://bucket/team']\n")
    assert read_policy().data == ("/data/team", "s3://bucket/team")
    file.write_text("quota: {gpu_hours: {ada: 1}}\n")
    assert [read_policy().quota(name) for name in ("ada", "bob")] == [1, None]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("slice_minutes: 0", "slice_minutes: must be greater than 0"),
        ("slice: 5", "slice: unknown field"),
        ("exclusive: 1", "exclusive: must be a valid boolean"),
        ("quota: {gpu_hours: {ada: -1}}", "quota.gpu_hours.ada: must be greater than or equal to 0"),
        ("quota: {gpu_hours: {ada: true}}", "quota.gpu_hours.ada: must be a number"),
        ("- 1", "must be a mapping with the fields slice_minutes, exclusive, quota, data"),
        ("data:", "data: must be a list, [] for synthetic data alone"),
        ("data: /data/team", "data: must be a valid list"),
        (
            "data: [/data, team]",
            "data.1: must be an absolute path, or the beginning of a URI without a password (given: ",
        ),
        ("data: [~/team]", "data.0: must be an absolute path"),
        ("data: ['s3://bucket/a/../b']", "data.0: must be an absolute path, or the beginning of a URI"),
        ("data: ['s3://key:secret@bucket']", "data.0: must be an absolute path, or the beginning of a URI"),
        ("a: [", "not valid YAML"),
        (None, "cannot be read: No such file"),
    ],
)
def test_what_is_wrong_with_the_file_is_one_line(file: Path, text: str | None, said: str) -> None:
    if text is not None:
        file.write_text(text)
    with pytest.raises(InputError) as raised:
        read_policy()
    assert str(raised.value).startswith(f"WATTUNE_POLICY: {file}")
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
