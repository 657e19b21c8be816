from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainables.bounds import is_place, refusal


@pytest.fixture
def team(tmp_path: Path) -> Path:
    """A folder that data may lie in, beside others with the like of them."""
    for folder in ("team", "teammate", "else"):
        (tmp_path / folder).mkdir()
        for name in ("corpus.bin", "corpus.idx", "tokens.npy"):
            (tmp_path / folder / name).touch()
    return tmp_path / "team"


def test_without_a_bound_anything_goes_and_with_one_made_up_tokens_always_do() -> None:
    assert refusal("/etc/tokens.npy", None) is None
    assert [refusal(source, ()) for source in ("synthetic", None)] == [None, None]
    assert refusal("/data/corpus", ()) == "data: /data/corpus lies outside of what WATTUNE_POLICY allows: synthetic"


@pytest.mark.parametrize("name", ["corpus", "corpus.bin", "corpus.idx", "tokens.npy", "new/corpus", "../team/corpus"])
def test_what_lies_in_the_folder_may_be_read(team: Path, name: str) -> None:
    for source in (f"{team}/{name}", f"file://{team}/{name}"):
        for place in (str(team), f"{team}/", f"file://{team}", "/"):
            assert refusal(source, ("/nowhere", place)) is None


@pytest.mark.parametrize(
    "name", ["../else/corpus", "../teammate/corpus", "../team", "", "new/../../else/tokens.npy", "..", "../team.bin"]
)
def test_what_lies_elsewhere_may_not(team: Path, name: str) -> None:
    for source in (f"{team}/{name}", f"file://{team}/{name}", f"file://{team}/{name.replace('..', '%2e%2e')}"):
        assert refusal(source, (str(team), "s3://bucket/team")) == (
            f"data: {source} lies outside of what WATTUNE_POLICY allows: synthetic, {team}, s3://bucket/team"
        )


@pytest.mark.parametrize("linked", ["corpus", "corpus.bin", "corpus.idx", "tokens.npy"])
def test_a_link_that_leads_out_of_the_folder_is_refused_whichever_file_it_is(team: Path, linked: str) -> None:
    (team / linked).unlink(missing_ok=True)
    (team / linked).symlink_to(team.parent / "else" / linked)
    name = linked if linked == "tokens.npy" else "corpus"
    for source in (f"{team}/{name}", f"file://{team}/{name}"):
        assert refusal(source, (str(team),)) == (
            f"data: {source} leads by a symbolic link outside of what WATTUNE_POLICY allows: synthetic, {team}"
        )


def test_so_is_what_lies_below_such_a_link_but_links_within_the_folder_are_followed(team: Path) -> None:
    (team / "out").symlink_to(team.parent / "else")
    (team / "in").symlink_to(team)
    assert "leads by a symbolic link" in (refusal(f"{team}/out/corpus", (str(team),)) or "")
    assert "leads by a symbolic link" in (refusal(f"{team}/in/out/corpus", (str(team),)) or "")
    assert refusal(f"{team}/in/corpus", (str(team),)) is None
    assert refusal(f"{team}/out/corpus", (str(team), str(team.parent / "else"))) is None


def test_the_folder_may_be_a_link_and_be_named_by_what_it_leads_to(team: Path) -> None:
    (place := team.parent / "link").symlink_to(team)
    assert refusal(f"{place}/corpus", (str(place),)) is None
    assert refusal(f"{team}/corpus", (str(place),)) is None
    assert refusal(f"{team.parent}/else/corpus", (str(place),)) is not None


def test_a_relative_path_begins_where_it_would_be_read(team: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(team)
    monkeypatch.setenv("HOME", str(team))
    for source in ("corpus", "~/corpus"):
        assert refusal(source, (str(team),)) is None
    assert refusal("../else/corpus", (str(team),)) is not None
    assert os.getcwd() == str(team)


@pytest.mark.parametrize(
    "source",
    ["s3://bucket/team/corpus", "s3://bucket/team/a/b.npy", "s3://bucket/team/%61", "gs://whole/a", "gs://whole/a/b"],
)
def test_uris_are_allowed_by_their_beginning(source: str) -> None:
    for place in ("s3://bucket/team", "s3://bucket/team/", "s3://bucket/te%61m"):
        assert refusal(source, (place, "gs://whole")) is None


@pytest.mark.parametrize(
    "source",
    [
        "s3://bucket/teammate/corpus",
        "s3://bucket/team",
        "s3://bucket/team/",
        "s3://bucket/team/../other/corpus",
        "s3://bucket/team/%2e%2e/other/corpus",
        "s3://bucket/team%2F..%2Fother/corpus",
        "s3://bucket/team/..",
        "s3://bucket/team/./corpus",
        "s3://bucket/team//corpus",
        "s3://bucket2/team/corpus",
        "s3://bucket/corpus",
        "s3://bucket",
        "s3://",
        "gs://bucket/team/corpus",
        "s3://key@bucket/team/corpus",
        "s3://bucket/team/corpus?endpoint_override=elsewhere:9000",
        "s3://bucket/team/corpus#part",
        "simplecache::s3://bucket/team/corpus",
        "s3://bucket/team/corpus::file:///etc/tokens",
        "file://bucket/team/corpus",
        "file:///data/corpus?/../../etc/tokens",
        "/data/s3://bucket/team/corpus",
        "/bucket/team/corpus",
    ],
)
def test_and_by_whole_segments_of_the_same_server(source: str) -> None:
    assert refusal(source, ("s3://bucket/team", "/data")) == (
        f"data: {source} lies outside of what WATTUNE_POLICY allows: synthetic, s3://bucket/team, /data"
    )


def test_a_server_of_ones_own_is_allowed_with_the_uri_that_names_it() -> None:
    own = "?endpoint_override=10.0.0.1:9000"
    assert refusal(f"s3://bucket/team/corpus{own}", (f"s3://bucket/team{own}",)) is None
    assert refusal("s3://bucket/team/corpus", (f"s3://bucket/team{own}",)) is not None


def test_a_place_is_an_absolute_folder_or_the_beginning_of_a_uri() -> None:
    assert all(map(is_place, ["/", "/data", "/data/team/", "file:///data", "s3://bucket", "abfs://a@b.net/c/d"]))
    wrong = ["", "data", "~/data", "s3://", "://a", "s3://bucket/../a", "s3://key:secret@bucket/a", "file://host/data"]
    assert not any(map(is_place, wrong))
