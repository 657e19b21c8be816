"""AMD GPUs, read through AMD SMI."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

from telemetry.devices import DeviceInfo, Vendor

logger = logging.getLogger(__name__)

GIB = 2**30
KIB = 2**10

_LIBRARY = "libamd_smi.so"
_UNSUPPORTED = 2**64 - 1

# Device ids of MI250X and MI250: two dies a card, of which one reports power and energy for both.
_TWO_DIES = ("0x7408", "0x740c")

# What no reading exceeds, in the unit that the field should have: more is 0xFFFF, "not supported", or a wrong unit.
_MAX_W = 10_000
_MAX_MHZ = 10_000
_MAX_C = 150
_MAX_PERCENT = 100
_MAX_LANES = 64
_MAX_GBIT_PER_S = 1_000

# Accumulated firmware ticks in which a limit held the clock down, by column.
_RESIDENCIES = {
    "throttle_power_cap_ns": ("ppt_residency_acc",),
    "throttle_sw_thermal_ns": ("socket_thm_residency_acc", "vr_thm_residency_acc", "hbm_thm_residency_acc"),
    "throttle_hw_thermal_ns": ("prochot_residency_acc",),
}


class AmdDevice:
    """One GPU as HIP sees it; of a card with two dies, one die.

    A sample takes one metrics table and the memory used, a full one the counts of memory errors too: these the driver
    collects from every block of the GPU, one by one.

    On an MI250 or MI250X one die reports the card's power and energy. Each of the two is given half of what it reports:
    the card is counted once, and a trial that has whole cards has their exact energy; which die drew it is not known,
    so the energy of either is `shared`, and that of a die whose partner is not seen is `estimated`. `card` names the
    card of a pair. `reporter` is the die that reports, for the one that does not.

    Power is the socket's present power, or its average where the firmware gives no other (MI200). The temperature is
    the hottest spot's, its margin that to the limit at which the GPU slows down. The clock is the mean of the compute
    dies'. `throttle_reasons` is `indep_throttle_status`: bits 0-15 power, 16-31 current, 32-47 heat.
    """

    def __init__(
        self,
        amdsmi: Any,
        handle: Any,
        index: int,
        uuid: str,
        dies: int = 1,
        card: str | None = None,
        reporter: AmdDevice | None = None,
    ) -> None:
        self._amdsmi = amdsmi
        self._handle = handle
        self._table = _MetricsTable(amdsmi.amdsmi_wrapper, handle)
        self._throttled = _ThrottledTime()
        self._reporter = reporter
        self._dies = dies
        self._socket: dict[str, Any] = {}
        self._partitioned = False
        self._limit_c = self._slowdown_temp_c()
        limit_w = (reporter or self)._power_limit_w()
        driver = self._ask(amdsmi.amdsmi_get_gpu_driver_info) or {}
        asic = self._ask(amdsmi.amdsmi_get_gpu_asic_info) or {}
        self.info = DeviceInfo(
            uuid=uuid,
            index=index,
            name=_known_text(asic.get("market_name")) or "AMD GPU",
            kind="amd",
            energy_method="counter" if dies == 1 else "shared" if card else "estimated",
            card=card,
            driver_version=_known_text(driver.get("driver_version")),
            power_limit_w=None if limit_w is None else limit_w / self._dies,
            link_peak_bytes_per_s=_xgmi_peak(self._table.read()),
        )

    def read(self, full: bool) -> dict[str, Any]:
        table = self._table.read()  # first, as close to the sample's time as can be
        now_ns = time.monotonic_ns()
        self._socket = {} if table is None else self._socket_reading(table)
        if table is None:
            return {}
        memory = self._ask(self._amdsmi.amdsmi_get_gpu_memory_usage, self._amdsmi.AmdSmiMemoryType.VRAM)
        activity = _at_most(table.average_gfx_activity, _MAX_PERCENT)
        limit_c, gpu_temp_c = self._limit_c, _hottest([table.temperature_hotspot]) or _hottest([table.temperature_edge])
        throttled = self._throttled.advance(table, now_ns)
        return (
            (self._reporter or self)._socket
            | throttled
            | (self._errors() if full else {})
            | {
                "sm_clock_mhz": _gfx_clock_mhz(table),
                "memory_clock_mhz": _at_most(table.current_uclk, _MAX_MHZ),
                "gpu_temp_c": gpu_temp_c,
                "gpu_temp_margin_c": None if gpu_temp_c is None or limit_c is None else limit_c - gpu_temp_c,
                "hbm_temp_c": _hottest([table.temperature_mem, *table.temperature_hbm]),
                "gpu_utilisation": None if activity is None else activity / 100,
                "memory_used_gib": None if memory is None else memory / GIB,
                "link_rx_bytes": None if self._partitioned else _link_bytes(table.xgmi_read_data_acc),
                "link_tx_bytes": None if self._partitioned else _link_bytes(table.xgmi_write_data_acc),
                "throttle_reasons": None if throttled else _counter(table.indep_throttle_status),
            }
        )

    def _socket_reading(self, table: Any) -> dict[str, Any]:
        """Power and energy of the socket, per die. None of a partition, whose readings are those of the whole GPU."""
        if _at_most(table.num_partition, 64) not in (None, 0, 1):
            if not self._partitioned:
                self._partitioned = True
                logger.warning("%s is a partition: power, energy and links of its GPU are left out", self.info.uuid)
            return {}
        ticks = _counter(table.energy_accumulator)
        if ticks == 0:  # the die that leaves it to the other one: its power is 0 as well
            return {}
        average_w = _at_most(table.average_socket_power, _MAX_W)
        present_w = _at_most(table.current_socket_power, _MAX_W)
        power_w = average_w if present_w is None else present_w
        return {
            "energy_mj": None if ticks is None else ticks * 15_259 // (1_000_000 * self._dies),  # 15.259 uJ each
            "power_w": None if power_w is None else power_w / self._dies,
            "power_average_w": None if average_w is None else average_w / self._dies,
        }

    def _power_limit_w(self) -> float | None:
        """The power cap, which amdsmi gives in uW or in W by version; 0 is a die without one."""
        cap = (self._ask(self._amdsmi.amdsmi_get_power_cap_info) or {}).get("power_cap")
        if not cap:
            return None
        return _at_most(cap if cap <= _MAX_W else cap / 1e6, _MAX_W)

    def _slowdown_temp_c(self) -> float | None:
        """The hottest spot's limit, which amdsmi gives in degrees or in thousandths by version."""
        kinds, metrics = self._amdsmi.AmdSmiTemperatureType, self._amdsmi.AmdSmiTemperatureMetric
        limit = self._ask(self._amdsmi.amdsmi_get_temp_metric, kinds.HOTSPOT, metrics.CRITICAL)
        return None if limit is None else _hottest([limit if limit <= _MAX_C else limit / 1000])

    def _errors(self) -> dict[str, Any]:
        """Errors since the driver was loaded, of memory and of other blocks; those deferred were not corrected."""
        counts = self._ask(self._amdsmi.amdsmi_get_gpu_total_ecc_count)
        if counts is None:
            return {}
        return {
            "ecc_corrected": counts["correctable_count"],
            "ecc_uncorrected": counts["uncorrectable_count"] + counts["deferred_count"],
        }

    def _ask(self, query: Any, *arguments: Any) -> Any:
        try:
            return query(self._handle, *arguments)
        except (self._amdsmi.AmdSmiException, ValueError):  # ValueError: text that is no UTF-8 or no number
            return None


class _MetricsTable:
    """A GPU's metrics as the library fills them in.

    Read as the C struct: amdsmi's own dictionary turns the throttle bits into a bool. A field that the library does not
    know stays at all ones, which is how AMD SMI says "not supported"; a newer library's longer struct has room.
    """

    def __init__(self, wrapper: Any, handle: Any) -> None:
        self._query, self._handle = wrapper.amdsmi_get_gpu_metrics_info, handle
        self._buffer = (ctypes.c_ubyte * (2 * ctypes.sizeof(wrapper.amdsmi_gpu_metrics_t)))()
        self._struct = wrapper.amdsmi_gpu_metrics_t.from_buffer(self._buffer)

    def read(self) -> Any | None:
        """The struct, valid until the next read; None if the GPU does not answer."""
        ctypes.memset(self._buffer, 0xFF, len(self._buffer))
        return self._struct if self._query(self._handle, ctypes.byref(self._struct)) == 0 else None


class _ThrottledTime:
    """Nanoseconds throttled, by column, from the residency counters of MI300 and later.

    These count firmware ticks of a length that is not documented, beside a counter of all ticks: what they grew by, as
    share of all ticks, is taken of the time between two readings. Socket, voltage regulators and memory may be too hot
    at the same time: of each stretch only the largest of the three counts. After a reset of the GPU all start again at
    0.
    """

    def __init__(self) -> None:
        self._before: tuple[int, int, dict[str, int]] | None = None
        self._total_ns: dict[str, float] = {}

    def advance(self, table: Any, now_ns: int) -> dict[str, int]:
        """The counters at a reading; without those that the GPU does not have."""
        ticks = table.accumulation_counter
        if ticks in (0, _UNSUPPORTED):
            return {}
        counts = {name: getattr(table, name) for names in _RESIDENCIES.values() for name in names}
        known = [
            column for column, names in _RESIDENCIES.items() if all(counts[name] != _UNSUPPORTED for name in names)
        ]
        if self._before is not None:
            before_ns, ticks_before, counts_before = self._before
            ticks_grown = ticks - ticks_before
            grown = {name: counts[name] - counts_before[name] for column in known for name in _RESIDENCIES[column]}
            if ticks_grown < 0 or not all(0 <= growth <= ticks_grown for growth in grown.values()):
                self._total_ns = {}
            elif ticks_grown == 0:
                now_ns = before_ns  # the table is the one before, so this stretch is not over
            else:
                for column in known:
                    share = max(grown[name] for name in _RESIDENCIES[column]) / ticks_grown
                    self._total_ns[column] = self._total_ns.get(column, 0.0) + share * (now_ns - before_ns)
        self._before = (now_ns, ticks, counts)
        return {column: round(self._total_ns.get(column, 0.0)) for column in known}


def _at_most(value: float, most: float) -> float | None:
    return value if 0 <= value <= most else None


def _counter(value: int) -> int | None:
    return None if value == _UNSUPPORTED else value


def _hottest(temperatures: Iterable[float]) -> float | None:
    """None where no sensor has a value; an absent one reads 0."""
    return max((value for value in temperatures if 0 < value <= _MAX_C), default=None)


def _gfx_clock_mhz(table: Any) -> float | None:
    clocks = [clock for clock in table.current_gfxclks if clock <= _MAX_MHZ]
    return sum(clocks) / len(clocks) if clocks else _at_most(table.current_gfxclk, _MAX_MHZ)


def _link_bytes(kib_by_link: Iterable[int]) -> int | None:
    """Bytes over all xGMI links; None where none is counted."""
    known = [kib for kib in kib_by_link if kib != _UNSUPPORTED]
    return sum(known) * KIB if known else None


def _xgmi_peak(table: Any | None) -> float | None:
    """Bytes a second that all xGMI links carry in one direction: Gbit/s a lane times lanes, of the links that are up.

    None before metrics table 1.7, which does not say which links are.
    """
    if table is None or table.xgmi_link_speed > _MAX_GBIT_PER_S or table.xgmi_link_width > _MAX_LANES:
        return None
    up = sum(status == 1 for status in table.xgmi_link_status)
    return up * table.xgmi_link_width * table.xgmi_link_speed * 1e9 / 8 or None


def _known_text(value: str | None) -> str | None:
    return None if value in (None, "", "N/A") else value


def torch_uuid(hip_uuid: str) -> str | None:
    """A GPU's UUID as torch spells it, from HIP's `GPU-` and 16 hex digits; None for what names no single GPU.

    HIP's 16 bytes are the digits themselves, as text; torch prints the bytes in hex.
    """
    digits = re.fullmatch(r"gpu-([0-9a-f]{16})", hip_uuid.lower())
    return f"GPU-{UUID(bytes=digits[1].encode())}" if digits else None


class _Gpu(NamedTuple):
    """A GPU before it is watched. One that is `silent` leaves its power and energy to the other die of its card."""

    bus_address: str
    number: int
    handle: Any
    hip_name: str | None
    two_dies: bool
    silent: bool


def discover(process_root: int) -> list[AmdDevice]:
    """All GPUs that AMD SMI shows and that answer, by PCI address; none where there is no driver or no binding."""
    amdsmi = _binding()
    if amdsmi is None:
        return []
    gpus = _gpus(amdsmi)
    same = Counter(gpu.hip_name for gpu in gpus)
    devices = []
    for card in _cards(gpus):
        reporter = None
        for gpu in card:
            unique = gpu.hip_name if same[gpu.hip_name] == 1 else None
            uuid = unique or f"amd:{gpu.bus_address}"
            if gpu.silent and reporter is None:
                logger.warning("%s: the die that reports its card's power and energy is not to be seen", uuid)
            name = f"amd:{card[0].bus_address}" if len(card) == 2 else None
            devices.append(AmdDevice(amdsmi, gpu.handle, gpu.number, uuid, 1 + gpu.two_dies, name, reporter))
            reporter = devices[-1]
    return devices


def _gpus(amdsmi: Any) -> list[_Gpu]:
    """The GPUs that answer, in AMD SMI's order."""
    try:
        amdsmi.amdsmi_init()
        handles = amdsmi.amdsmi_get_processor_handles()
    except amdsmi.AmdSmiException as error:
        if getattr(error, "err_code", None) != amdsmi.amdsmi_wrapper.AMDSMI_STATUS_DRIVER_NOT_LOADED:
            logger.warning("AMD SMI does not answer, no AMD GPU is watched: %s", _line(error))
        return []
    gpus = []
    for index, handle in enumerate(handles):
        try:
            bus_address = amdsmi.amdsmi_get_gpu_device_bdf(handle)
            two_dies = amdsmi.amdsmi_get_gpu_asic_info(handle)["device_id"] in _TWO_DIES
            hip_uuid = amdsmi.amdsmi_get_gpu_enumeration_info(handle)["hip_uuid"]
        except (amdsmi.AmdSmiException, ValueError) as error:
            logger.warning("AMD GPU %d does not answer and is not watched: %s", index, _line(error))
            continue
        silent = two_dies and not _reports_power(amdsmi, handle)
        gpus.append(_Gpu(bus_address, index, handle, torch_uuid(hip_uuid), two_dies, silent))
    return gpus


def _cards(gpus: list[_Gpu]) -> list[list[_Gpu]]:
    """GPUs in the order of their PCI addresses; a die that is silent joins the one before it that is not."""
    cards: list[list[_Gpu]] = []
    for gpu in sorted(gpus, key=lambda gpu: gpu.bus_address):
        if gpu.silent and cards and len(cards[-1]) == 1 and cards[-1][0].two_dies and not cards[-1][0].silent:
            cards[-1].append(gpu)
        else:
            cards.append([gpu])
    return cards


def _reports_power(amdsmi: Any, handle: Any) -> bool:
    """Whether a die of a card with two is the one that has the card's power and energy."""
    table = _MetricsTable(amdsmi.amdsmi_wrapper, handle).read()
    return table is not None and table.energy_accumulator not in (0, _UNSUPPORTED)


def _binding() -> Any | None:
    """The amdsmi module, imported only where ROCm's library is: without it, importing raises what nobody expects."""
    package = importlib.util.find_spec("amdsmi")
    if package is None:
        if Path("/dev/kfd").exists():
            logger.warning("AMD's GPU driver is here, amdsmi is not: no AMD GPU is watched; pip install 'wattune[amd]'")
        return None
    if not any(_is_loadable(path) for path in _library_paths(package.origin)):
        logger.warning(
            "amdsmi is installed but ROCm's %s is not found, no AMD GPU is watched: set ROCM_PATH or uninstall amdsmi",
            _LIBRARY,
        )
        return None
    try:
        import amdsmi
    except (ImportError, AttributeError, KeyError, OSError) as error:
        logger.warning("amdsmi does not go with this %s, no AMD GPU is watched: %s", _LIBRARY, _line(error))
        return None
    return amdsmi


def _library_paths(package: str | None) -> list[str]:
    """Where amdsmi looks for its library, whose name alone leaves it to the linker."""
    roots = [root for name in ("ROCM_HOME", "ROCM_PATH") if (root := os.environ.get(name))]
    paths = [f"{root}/lib/{_LIBRARY}" for root in [*roots, "/opt/rocm"]]
    return [_LIBRARY, *paths, *([str(Path(package).with_name(_LIBRARY))] if package else [])]


def _is_loadable(path: str) -> bool:
    try:
        ctypes.CDLL(path)
    except OSError:
        return False
    return True


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


VENDOR = Vendor(kind="amd", discover=discover, throttle_bits={"power_cap": 0xFFFF, "sw_thermal": 0xFFFF << 32})
"""The bits are those of AMD SMI's `indep_throttle_status`. Limits of current, between these two, are no cause."""
