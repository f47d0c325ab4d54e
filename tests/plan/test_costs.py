"""What messages and codes cost: measured, written and read back."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import AxisType

import jaxcomm
from jaxcomm import plan
from jaxcomm.kernels import _device
from jaxcomm.plan import probing
from jaxcomm.plan.costs import DEFAULTS
from jaxcomm.plan.families import FAMILIES, Method
from jaxcomm.plan.simulate import Model

FREE = plan.Costs("none", 0.0, 0.0, 1.0, False, 0.0, False, False, 0.0, {})


class TestCosts:
    """Measured, written and read back."""

    def test_they_are_read_as_written(self, tmp_path: Path) -> None:
        costs = dataclasses.replace(FREE, latency=1e-4, local={"int8": (1e-9, 1e-9)})
        costs.save(tmp_path / "costs.yaml")
        assert plan.read_costs(tmp_path / "costs.yaml") == costs

    def test_they_may_be_written_by_hand(self, tmp_path: Path) -> None:
        """YAML takes 1e-4, unlike 1.0e-4, for a text."""
        path = tmp_path / "costs.yaml"
        FREE.save(path)
        text = path.read_text().replace("latency: 0.0", "latency: 1e-4")
        path.write_text(text.replace("local: {}", "local: {int8: [1e-9, 2e-9]}"))
        wanted = dataclasses.replace(FREE, latency=1e-4, local={"int8": (1e-9, 2e-9)})
        assert plan.read_costs(path) == wanted

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            ("latency: 0.0", "latency: -1.0", "latency is in seconds, 0 or more, got -1.0"),
            ("swap: 0.0", "swap: -1.0", "swap is in seconds, 0 or more, got -1.0"),
            ("call: 0.0", "call: -1.0", "call is in seconds, 0 or more, got -1.0"),
            ("per_byte: 0.0", "per_byte: -1.0", "per_byte is in seconds, 0 or more, got -1.0"),
            ("local: {}", "local: {int8: [1.0e-9]}", "int8 takes seconds per value, among"),
            ("latency: 0.0", "latency: soon", "line 3: latency is a number, got 'soon'"),
            ("latency: 0.0", "lateness: 0.0", "line 3: unknown key 'lateness'"),
            (
                "version: 3",
                "version: 1",
                "line 1: the file is version 1; this jaxcomm reads version 3",
            ),
            (
                "local: {}",
                "local: {int8: fast}",
                "int8 takes seconds per value, among",
            ),
            (
                "local: {}",
                "local: {int88: [1e-9, 2e-9]}",
                "there is no family 'int88'; there are",
            ),
            ("local: {}", "local: {vote/rings: [1e-9, 2e-9]}", "there is no family 'vote/rings'"),
            ("local: {}", "local: {int8/hosts/ring: [1e-9, 2e-9]}", "family .int8/hosts/ring.;"),
            ("local: {}", "local: 3", "line 11: local has a line for each family, got 3"),
            ("overlap: false", "overlap: 1", "overlap is true or false, got 1"),
            ("efficiency: 1.0", "efficiency: 2.0", r"efficiency is a share in \(0, 1\], got 2.0"),
        ],
    )
    def test_a_wrong_file_is_one_line(
        self, old: str, new: str, message: str, tmp_path: Path
    ) -> None:
        path = tmp_path / "costs.yaml"
        FREE.save(path)
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
        with pytest.raises(ValueError, match=message) as error:
            plan.read_costs(path)
        assert "\n" not in str(error.value)

    def test_every_family_has_default_costs(self) -> None:
        for costs in DEFAULTS.values():
            assert set(FAMILIES) <= set(costs.local)

    def test_there_is_no_file(self) -> None:
        with pytest.raises(ValueError, match="there is no file no.yaml; python -m jaxcomm.probe"):
            plan.read_costs("no.yaml")

    def test_there_is_nothing_in_it(self, tmp_path: Path) -> None:
        path = tmp_path / "costs.yaml"
        path.write_text("\n")
        with pytest.raises(ValueError, match="has no settings; .*, as latency: 0.0001"):
            plan.read_costs(path)

    def test_a_probe_of_simulated_devices(self, make_mesh: Any) -> None:
        found = plan.probe(make_mesh(4), families=["float32"])
        assert found.source.startswith("measured on 4 devices") and found.latency > 0
        assert found.swap == 0  # nothing is swapped in one process
        assert set(found.local) == {"float32", "float32/ring"}
        assert all(min(pair) > 0 for pair in found.local.values())
        with pytest.raises(ValueError, match="unknown family 'int3'"):
            plan.probe(make_mesh(4), families=["int3"])
        with pytest.MonkeyPatch.context() as patch:
            length = lambda _, asked, *__: {(m, n): n + len(m.name) for m, n in asked}  # noqa: E731
            patch.setattr(probing, "_seconds", length)
            local = plan.probe(make_mesh(4), families=["cnat", "vote"]).local
        few, many = 2**18, 2**21
        assert local == {
            "cnat": (few + len("cnat/direct"), many + len("cnat/direct")),
            "cnat/ring": (few + len("cnat/ring"), many + len("cnat/ring")),
            "vote": (few + len("vote/direct"), many + len("vote/direct")),
        }
        with pytest.raises(ValueError, match="several devices"):
            plan.probe(make_mesh(1))
        with pytest.raises(ValueError, match="the cluster has 2 devices, the mesh 4"):
            plan.probe(make_mesh(4), plan.cluster(plan.fabrics.star("two", 2, 10)))

    def test_the_first_runs_do_not_count(
        self, make_mesh: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Told by a clock that stands still, but for what a run takes."""
        clock, took = [0.0], iter([9.0, 9.0, 1.0, 2.0, 3.0])

        def run() -> None:
            clock[0] += next(took)

        monkeypatch.setattr(probing.time, "perf_counter", lambda: clock[0])
        assert probing._times(make_mesh(4), run, repeats=3, warm=2) == [1, 2, 3]

    def test_between_cpu_processes_swaps_are_timed(
        self, make_mesh: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(_device, "is_between_cpu_processes", lambda: True)
        found = plan.probe(make_mesh(4), families=[])
        assert found.swap > 0 and found.is_between_cpus

    @pytest.mark.parametrize("name", ["int8/direct", "vote/ring", "oktopk", "powersgd1"])
    def test_codes_are_timed_without_their_messages(
        self, name: str, make_mesh: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All but their first numbers; those of a low rank are sent. Their time is taken off."""
        ran: list[Any] = []
        lower = jax.stages.Lowered.compile

        def compiled(lowered: Any) -> Any:
            ran.append(lower(lowered))
            return ran[-1]

        monkeypatch.setattr(jax.stages.Lowered, "compile", compiled)
        monkeypatch.setattr(probing, "_times", lambda *args: [1.0])
        family, _, algorithm = name.partition("/")
        method = Method(family, algorithm or FAMILIES[family].algorithms[0])
        mesh = probing.mesh_.data_mesh(devices=make_mesh(4).devices.flat)
        values = 2**16
        asked = (method, values)
        seconds = probing._seconds(mesh, [asked], Model(latency=1e-3, per_byte=1e-7))[asked]
        sent = jaxcomm.wire_report(ran[-1]).bytes_max
        if family != "powersgd1":
            assert sent <= 64  # first numbers, a flag, counts
            assert seconds * values == pytest.approx(1.0 - 6e-3)
        else:
            thin = 4 * 2 * (1024 + values // 2048)  # of two matrices
            assert sent >= 1.5 * thin
            assert seconds * values == pytest.approx(1.0 - 2 * 6e-3 - 1.5 * thin * 1e-7, rel=1e-3)

    def test_whatever_mesh_is_set(self, make_mesh: Any) -> None:
        """One with other devices, and one by jax, whose axis is Explicit."""
        explicit = jax.make_mesh((4,), ("data",), (AxisType.Explicit,), devices=jax.devices()[:4])
        for asked, is_set in ((make_mesh(4), make_mesh(8)), (explicit, explicit)):
            with jax.set_mesh(is_set):
                assert plan.probe(asked, families=["float32"]).latency > 0

    @pytest.mark.parametrize(
        ("latency", "per_byte", "values"),
        [(1e-3, 8e-6, 2**13), (1e-3, 8e-7, 2**13), (1e-3, 8e-8, 2**17), (0.1, 8e-9, 2**19)],
    )
    def test_a_slow_network_is_asked_with_short_messages(
        self,
        latency: float,
        per_byte: float,
        values: int,
        make_mesh: Any,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        asked = []

        def message(mesh: Any, pairs: Any, values: int, repeats: int = probing.REPEATS) -> float:
            asked.append((values, repeats))
            return latency + 4 * values * per_byte

        monkeypatch.setattr(probing, "_message", message)
        found = plan.probe(make_mesh(4), families=[])
        assert found.per_byte == pytest.approx(per_byte, rel=1e-3)
        assert [n for n, repeats in asked if repeats == probing.REPEATS] == 3 * [values]
        sent = sum(4 * n * probing.CHAINED * (1 + repeats) for n, repeats in asked)
        assert sent * per_byte < 60


def test_a_message_that_seems_to_cost_nothing(
    make_mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "_message", lambda *args: 1e-3)
    with pytest.warns(UserWarning, match="took no longer than one of 4: other work"):
        found = plan.probe(make_mesh(4), families=[])
    assert found.per_byte == plan.defaults("cpu").per_byte


def test_a_rate_that_messages_belie_is_said() -> None:
    assert probing._efficiency(0.94e-9, 1e-9) == pytest.approx(0.94)
    with pytest.warns(UserWarning, match="reach 1e[+]03 of the rates .* right unit"):
        assert probing._efficiency(1e-6, 1e-9) == 1.0
    with pytest.warns(UserWarning, match="reach 0.01 of the rates"):
        assert probing._efficiency(1e-9, 1e-7) == pytest.approx(0.01)
