"""NVIDIA GPUs, read through NVML."""

from __future__ import annotations

import ctypes
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from telemetry import zeusd
from telemetry.devices import DeviceInfo, Vendor

logger = logging.getLogger(__name__)

GIB = 2**30
MIB = 2**20

_MEMORY_SCOPE = 2  # NVML_POWER_SCOPE_MEMORY
_ALL_LINKS = 2**32 - 1


class _Field(NamedTuple):
    """A field of NVML (nvml.h: NVML_FI_DEV_*) and the factor to the column's unit; a whole one keeps whole numbers."""

    id: int
    scope: int = 0
    factor: float | int = 1


# Microseconds each: read at every tick.
_FIELDS = {
    "power_w": _Field(186, factor=1e-3),
    "power_average_w": _Field(185, factor=1e-3),
    "hbm_power_w": _Field(185, _MEMORY_SCOPE, factor=1e-3),
    "hbm_temp_c": _Field(82, factor=1.0),
    "throttle_power_cap_ns": _Field(74),
    "throttle_sync_boost_ns": _Field(76),
}
# Milliseconds in all, most of them for the energy, which comes first.
_COSTLY_FIELDS = {"energy_mj": _Field(83), "throttle_thermal_policy_ns": _Field(75)}
# Where there is no GPM. The first two wrap at 2^32.
_PCIE_FIELDS = {"pcie_tx_bytes": _Field(197), "pcie_rx_bytes": _Field(198)}
_LINK_FIELDS = {"link_tx_bytes": _Field(138, _ALL_LINKS, 1024), "link_rx_bytes": _Field(139, _ALL_LINKS, 1024)}

_RENUMBERED_IN = (580, 82)
_VALUE_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by nvmlValueType_t

# Metrics of GPM (nvml.h: NVML_GPM_METRIC_*): percent, and MiB/s seen from the GPU.
_ACTIVITIES = {"tensor_activity": 5, "dram_activity": 10}
_RATES = {"pcie_tx_bytes": 20, "pcie_rx_bytes": 21, "link_rx_bytes": 60, "link_tx_bytes": 61}

_PCIE_LANE_BYTES_PER_S = {
    1: 2.5e9 * 8 / 10 / 8,
    2: 5e9 * 8 / 10 / 8,
    3: 8e9 * 128 / 130 / 8,
    4: 16e9 * 128 / 130 / 8,
    5: 32e9 * 128 / 130 / 8,
    6: 64e9 / 8,
}
"""Bytes per second and lane in one direction, by generation: the transfer rate less the line's encoding."""

_LINK_SPEED_FIELD = 164
_COMMON_LINK_SPEED_FIELD = 90

REFRESH_NS = 100_000_000
"""How often Hopper refreshes its energy counter, by a clock of its own."""

REFRESH_SEEN_NS = 5_000_000
"""How exactly a refresh is seen. A reading in its midst takes 15 ms, and tells the value before or after it."""

REFRESH_LEAD_NS = 12_000_000
"""A reading that is begun less than this before a refresh may not end before it."""

REFRESH_DRIFT = 50e-6
"""More than the GPU's clock drifts from the host's: 25e-6 on one H200."""

REFRESH_WATCH_S = 60.0
"""How often a refresh is looked for; after five times that without one, the moment is not known any more."""

MAX_BYTES_PER_S = 1e13
"""More than any fabric of one GPU carries: a rate above it was misread."""

SLOW_SAMPLE_NS = 50_000_000
"""A sample of GPM, or a look at the energy counter, that took longer to take is of no known moment."""


def throttle_field_ids(driver_version: str) -> dict[str, int]:
    """NVML field ids of the throttle counters that driver 580.82 renumbered, by column, for a version as `580.65.06`.

    Asking with the other numbering would read unrelated counters, so an unreadable version has no such fields.
    """
    match = re.match(r"(\d+)\.(\d+)", driver_version)
    if match is None:
        return {}
    first = 269 if (int(match[1]), int(match[2])) >= _RENUMBERED_IN else 251
    return {
        "throttle_sw_thermal_ns": first,
        "throttle_hw_thermal_ns": first + 1,
        "throttle_hw_brake_ns": first + 2,
    }


class NvidiaDevice:
    """One GPU; of one in MIG mode, the whole with what it still answers.

    A tick is one batched NVML call and some calls of microseconds. A full reading has another batched call before them,
    its energy first, and after them ECC counters (volatile: since the driver was loaded), the margin to the thermal
    limit and GPM. Traffic is GPM's rates added up; a GPU without GPM has it from byte counters.

    What the GPU or the driver does not support is asked once. Any other error is a null of that reading. A batched call
    that fails is logged, once for each error; of a GPU whose tick fails, XID errors alone are read.
    """

    def __init__(self, nvml: Any, index: int) -> None:
        self._nvml = nvml
        self._handle = handle = nvml.nvmlDeviceGetHandleByIndex(index)
        driver_version = nvml.nvmlSystemGetDriverVersion()
        limit_mw = _answer(nvml, lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
        default_mw = _answer(nvml, lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle))
        self.info = DeviceInfo(
            uuid=nvml.nvmlDeviceGetUUID(handle),
            index=index,
            name=nvml.nvmlDeviceGetName(handle),
            kind="nvidia",
            energy_method="counter",
            driver_version=driver_version,
            power_limit_w=None if limit_mw is None else limit_mw / 1000,
            default_power_limit_w=None if default_mw is None else default_mw / 1000,
            max_sm_clock_mhz=_answer(nvml, lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)),
            pcie_peak_bytes_per_s=_answer(nvml, lambda: _pcie_peak(nvml, handle)),
            link_peak_bytes_per_s=_answer(nvml, lambda: _nvlink_peak(nvml, handle)),
        )
        fields, costly = dict(_FIELDS), dict(_COSTLY_FIELDS)
        for column, field_id in throttle_field_ids(driver_version).items():
            (fields if column == "throttle_sw_thermal_ns" else costly)[column] = _Field(field_id)
        self._gpm = _answer(nvml, lambda: _Gpm(nvml, handle))
        energy = _Fields(nvml, handle, {"energy_mj": _COSTLY_FIELDS["energy_mj"]})
        self._refresh = _answer(nvml, lambda: _Refresh(energy))
        self._wrapping: dict[str, _WrappingBytes] = {}
        if self._gpm is None:
            costly |= _LINK_FIELDS
            if peak := self.info.pcie_peak_bytes_per_s:
                fields |= _PCIE_FIELDS
                self._wrapping = {column: _WrappingBytes(peak) for column in _PCIE_FIELDS}
        self._fields, self._costly_fields = _Fields(nvml, handle, fields), _Fields(nvml, handle, costly)
        self._queries = _Queries(
            nvml,
            {
                "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                "memory_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
                "gpu_temp_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
                "gpu_utilisation": lambda: _share(nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
                "memory_used_gib": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used / GIB,
                "throttle_reasons": lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
            },
        )
        corrected, uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        volatile = nvml.NVML_VOLATILE_ECC
        self._costly_queries = _Queries(
            nvml,
            {
                "ecc_corrected": lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, corrected, volatile),
                "ecc_uncorrected": lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, uncorrected, volatile),
                "gpu_temp_margin_c": lambda: nvml.nvmlDeviceGetMarginTemperature(handle),
            },
        )
        self._xids = _answer(nvml, lambda: _XidWatch(nvml, handle))
        self._logged: set[str] = set()

    def read(self, full: bool) -> dict[str, Any]:
        sample: dict[str, Any] = self._xids.read() if self._xids else {}
        if full:
            refreshed_ns = self._refresh.latest() if self._refresh else None
            sample |= self._ask(self._costly_fields) or {}
            if refreshed_ns is not None and time.monotonic_ns() - refreshed_ns < REFRESH_NS:
                sample["energy_ns"] = refreshed_ns
        asked_ns = time.monotonic_ns()
        fields = self._ask(self._fields)
        if fields is None:
            return sample
        for column, wrapping in self._wrapping.items():
            fields[column] = wrapping.advance(fields.get(column), asked_ns, time.monotonic_ns())
        sample |= fields | self._queries.read()
        if full:
            sample |= self._costly_queries.read()
            if self._gpm:
                sample |= self._gpm.read()
        return sample

    def align(self, until_ns: int) -> None:
        if self._refresh:
            with suppress(self._nvml.NVMLError):  # the next tick tells
                self._refresh.follow(until_ns)

    def power_limit_range_w(self) -> tuple[float, float]:
        """By NVML, as all of these."""
        with _told():
            least_mw, highest_mw = self._nvml.nvmlDeviceGetPowerManagementLimitConstraints(self._handle)
        return least_mw / 1000, highest_mw / 1000

    def power_limit_w(self) -> float:
        """The one that was set, which the driver may enforce a lower one than."""
        with _told():
            limit_mw: int = self._nvml.nvmlDeviceGetPowerManagementLimit(self._handle)
        return limit_mw / 1000

    def set_power_limit(self, watts: float) -> None:
        """Through zeusd where the environment names its socket, as that may and this process need not; else by NVML,
        which lets root alone."""
        if (path := zeusd.socket_path()) is not None:
            zeusd.set_power_limit(path, self.info.index, round(1000 * watts))
            return
        with _told():
            self._nvml.nvmlDeviceSetPowerManagementLimit(self._handle, round(1000 * watts))

    def _ask(self, fields: _Fields) -> dict[str, float | int | None] | None:
        try:
            return fields.read()
        except self._nvml.NVMLError as error:
            if str(error) not in self._logged:
                self._logged.add(str(error))
                logger.warning("%s does not answer: %s", self.info.uuid, error)
            return None


class _Fields:
    """Fields of a GPU by column, asked of NVML in one call, in their order."""

    def __init__(self, nvml: Any, handle: Any, fields: Mapping[str, _Field]) -> None:
        self._nvml, self._handle = nvml, handle
        self._query = nvml._nvmlGetFunctionPointer("nvmlDeviceGetFieldValues")  # its wrapper takes 3 times as long
        self._prepare(fields)

    def _prepare(self, fields: Mapping[str, _Field]) -> None:
        self._columns = fields
        self._values = (self._nvml.c_nvmlFieldValue_t * len(fields))()
        for value, field in zip(self._values, fields.values(), strict=True):
            value.fieldId, value.scopeId, value.nvmlReturn = field.id, field.scope, self._nvml.NVML_ERROR_UNKNOWN
        self._blank = bytes(self._values)

    def read(self) -> dict[str, float | int | None]:
        """Raises NVMLError if the call fails, or every field for another reason than that it is not supported."""
        if not self._columns:
            return {}
        nvml = self._nvml
        ctypes.memmove(self._values, self._blank, len(self._blank))
        status = self._query(self._handle, len(self._columns), self._values)
        if status != nvml.NVML_SUCCESS:
            raise nvml.NVMLError(status)
        reading: dict[str, float | int | None] = {}
        failed: dict[str, int] = {}
        for (column, field), value in zip(self._columns.items(), self._values, strict=True):
            if value.nvmlReturn == nvml.NVML_SUCCESS:
                reading[column] = _field_value(value, field.factor)
            else:
                failed[column] = value.nvmlReturn
        unsupported = [column for column, error in failed.items() if error == nvml.NVML_ERROR_NOT_SUPPORTED]
        if unsupported:
            self._prepare({column: field for column, field in self._columns.items() if column not in unsupported})
        elif not reading:
            raise nvml.NVMLError(next(iter(failed.values())))
        return reading


def _field_value(field: Any, factor: float | int) -> float | int | None:
    """The value of an nvmlFieldValue_t times the factor; None for one that cannot be."""
    if not 0 <= field.valueType < len(_VALUE_MEMBERS):
        return None
    value = getattr(field.value, _VALUE_MEMBERS[field.valueType])
    if not math.isfinite(value) or value < 0:
        return None
    return (int(value) if isinstance(factor, int) else value) * factor


class _Queries:
    """Calls of NVML by the column that they answer."""

    def __init__(self, nvml: Any, queries: dict[str, Callable[[], Any]]) -> None:
        self._nvml, self._queries = nvml, queries

    def read(self) -> dict[str, Any]:
        reading = {}
        for column, query in list(self._queries.items()):
            try:
                reading[column] = query()
            except self._nvml.NVMLError_NotSupported:
                del self._queries[column]
            except self._nvml.NVMLError:
                pass
        return reading


class _XidWatch:
    """XID errors of a GPU since the watch began. Raises NVMLError where they cannot be watched."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._events = nvml.nvmlEventSetCreate()
        nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)
        self._wait = nvml._nvmlGetFunctionPointer("nvmlEventSetWait_v2")  # its wrapper raises when there is no event
        self._event = nvml.c_nvmlEventData_t()
        self._count = 0
        self._latest: int | None = None

    def read(self) -> dict[str, int | None]:
        """The number of errors, None while it may lack some, and that of the latest one."""
        while (status := self._wait(self._events, ctypes.byref(self._event), 0)) == self._nvml.NVML_SUCCESS:
            self._count += 1
            self._latest = self._event.eventData
        return {"xid_errors": self._count if status == self._nvml.NVML_ERROR_TIMEOUT else None, "xid": self._latest}


class _Gpm:
    """Activity since the last reading and bytes moved since the first, by a GPU's performance monitors (Hopper on).

    Raises NVMLError on a GPU without them, and in MIG mode.
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        self._nvml, self._handle = nvml, handle
        self._before, self._now = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        self._request = nvml.c_nvmlGpmMetricsGet_t()
        self._request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        self._metrics = _ACTIVITIES | _RATES
        self._request.numMetrics = len(self._metrics)
        for place, metric in enumerate(self._metrics.values()):
            self._request.metrics[place].metricId = metric
        self._totals = {column: _Total() for column in _RATES}
        nvml.nvmlGpmSampleGet(handle, self._before)
        self._before_ns: int = time.monotonic_ns()

    def read(self) -> dict[str, float | int | None]:
        """Nothing if NVML does not answer, or too late: the next reading then covers this one's time too."""
        nvml, request = self._nvml, self._request
        asked_ns = time.monotonic_ns()
        try:
            nvml.nvmlGpmSampleGet(self._handle, self._now)
            now_ns = time.monotonic_ns()
            if now_ns - asked_ns > SLOW_SAMPLE_NS:
                return {}
            request.sample1, request.sample2 = self._before, self._now
            nvml.nvmlGpmMetricsGet(request)
        except nvml.NVMLError:
            return {}
        seconds = (now_ns - self._before_ns) / 1e9
        self._before, self._now, self._before_ns = self._now, self._before, now_ns
        reading: dict[str, float | int | None] = {}
        for column, metric in zip(self._metrics, request.metrics, strict=False):  # it has room for every metric
            value = metric.value if metric.nvmlReturn == nvml.NVML_SUCCESS else math.nan
            if column in _ACTIVITIES:
                reading[column] = _share(value)
            else:
                known = 0 <= value * MIB <= MAX_BYTES_PER_S
                reading[column] = self._totals[column].add(round(value * MIB * seconds) if known else None)
        return reading


class _Refresh:
    """When a GPU refreshes its energy counter, which NVML does not tell: a field's timestamp is that of the call.

    The counter is read until it moves: at first for some periods, then now and then about when it is expected to. Of a
    GPU with another period nothing is known. Raises NVMLError if the GPU does not answer.
    """

    def __init__(self, energy: _Fields) -> None:
        self._energy = energy
        self._seen_ns: int | None = None
        self._looked_ns = 0
        for _ in range(3):  # one refresh in a hundred is seen late
            first = self._watch(time.monotonic_ns() + 2 * REFRESH_NS)
            second = None if first is None else self._watch(first + 2 * REFRESH_NS)
            if first is None or second is None:
                return
            if abs(second - first - REFRESH_NS) <= REFRESH_SEEN_NS:
                self._seen_ns = self._looked_ns = second
                return

    def latest(self) -> int | None:
        """When the counter, read now, was refreshed, if that is known. Waits some ms where one is under way."""
        now_ns = time.monotonic_ns()
        if self._seen_ns is None or now_ns - self._seen_ns > 5 * REFRESH_WATCH_S * 1e9:
            return None
        since_ns = (now_ns - self._seen_ns + REFRESH_LEAD_NS) % REFRESH_NS - REFRESH_LEAD_NS
        if since_ns < REFRESH_SEEN_NS:
            time.sleep((REFRESH_SEEN_NS - since_ns) / 1e9)
        return now_ns - since_ns

    def follow(self, until_ns: int) -> None:
        """Look for the next refresh, if that is due and it must come before `until_ns`."""
        now_ns = time.monotonic_ns()
        if self._seen_ns is None or now_ns - self._looked_ns < REFRESH_WATCH_S * 1e9:
            return
        unsure_ns = REFRESH_SEEN_NS + round(REFRESH_DRIFT * (now_ns - self._seen_ns))
        expected_ns = now_ns + unsure_ns + REFRESH_NS - (now_ns + unsure_ns - self._seen_ns) % REFRESH_NS
        if expected_ns + unsure_ns <= until_ns:
            self._looked_ns = now_ns
            time.sleep((expected_ns - unsure_ns - now_ns) / 1e9)
            self._seen_ns = self._watch(expected_ns + unsure_ns) or self._seen_ns

    def _watch(self, until_ns: int) -> int | None:
        """When the counter moved; None if it did not before then, or cannot be read."""
        before = self._energy.read().get("energy_mj")
        while before is not None and (asked_ns := time.monotonic_ns()) < until_ns:
            if self._energy.read().get("energy_mj") != before:
                return asked_ns if time.monotonic_ns() - asked_ns < SLOW_SAMPLE_NS else None
            time.sleep(0.001)
        return None


class _WrappingBytes:
    """A running total from a byte counter that wraps at 2^32, of a fabric of `peak` bytes per second.

    Where the fabric could have carried 2^32 bytes since the reading before, there is no telling how many it did.
    """

    def __init__(self, peak: float) -> None:
        self._wraps_in_ns = 2**32 / peak * 1e9
        self._total = _Total()
        self._before: tuple[int, int] | None = None

    def advance(self, count: float | int | None, asked_ns: int, answered_ns: int) -> int | None:
        """The total at a reading of `count`, None where it failed or may have wrapped unseen."""
        if count is None:
            return None
        grown: int | None = 0
        if self._before is not None:
            count_before, asked_before_ns = self._before
            sure = answered_ns - asked_before_ns < self._wraps_in_ns
            grown = (int(count) - count_before) % 2**32 if sure else None
        self._before = int(count), asked_ns
        return self._total.add(grown)


class _Total:
    """A running total of bytes. After a stretch of which they are not known it goes on from a lower number, so that
    no difference across the stretch looks whole, whichever readings are kept.
    """

    _FALL = 2**44  # more than is moved between two readings

    def __init__(self) -> None:
        self._lowest = self._bytes = 2**62
        self._complete = False

    def add(self, grown: int | None) -> int | None:
        """The total with `grown` bytes more; None for a stretch that is not known."""
        if grown is None:
            if self._complete:
                self._lowest -= self._FALL
                self._bytes = self._lowest
            self._complete = False
            return None
        self._complete = True
        self._bytes += grown
        return self._bytes if self._lowest >= 0 else None


@contextmanager
def _told() -> Iterator[None]:
    """What NVML refuses as an OSError with its words."""
    import pynvml

    try:
        yield
    except pynvml.NVMLError as error:
        raise OSError(f"NVML: {error}") from None


def _share(percent: float) -> float | None:
    return percent / 100 if 0 <= percent <= 100 else None


def _answer(nvml: Any, query: Callable[[], Any]) -> Any:
    try:
        return query()
    except nvml.NVMLError:
        return None


def _pcie_peak(nvml: Any, handle: Any) -> float | None:
    """Of the fastest link that the GPU and its slot can have: an idle one is slower to save power."""
    lane = _PCIE_LANE_BYTES_PER_S.get(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))
    width: int = nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
    return lane * width if lane and width else None


def _nvlink_peak(nvml: Any, handle: Any) -> float | None:
    """Of all active NVLinks together; None if there are none, or one of unknown speed."""
    links = [link for link in range(nvml.NVML_NVLINK_MAX_LINKS) if _link_is_active(nvml, handle, link)]
    speeds = {"common": _Field(_COMMON_LINK_SPEED_FIELD)}
    speeds |= {str(link): _Field(_LINK_SPEED_FIELD, link) for link in links}
    mb_per_s = _Fields(nvml, handle, speeds).read()
    total = [mb_per_s.get(str(link)) or mb_per_s.get("common") for link in links]
    known = [speed for speed in total if speed]
    return sum(known) * 1e6 if known and len(known) == len(links) else None


def _link_is_active(nvml: Any, handle: Any, link: int) -> bool:
    return bool(_answer(nvml, lambda: nvml.nvmlDeviceGetNvLinkState(handle, link)))


def discover(process_root: int) -> list[NvidiaDevice]:
    """All GPUs that NVML shows and that answer; none where there is no driver or no binding."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return []
    except pynvml.NVMLError as error:
        logger.warning("NVML does not answer, no GPU is watched: %s", error)
        return []
    devices = []
    for index in range(count):
        try:
            devices.append(NvidiaDevice(pynvml, index))
        except pynvml.NVMLError as error:
            logger.warning("GPU %d does not answer and is not watched: %s", index, error)
    return devices


VENDOR = Vendor(
    kind="nvidia",
    discover=discover,
    throttle_bits={"power_cap": 0x4, "sw_thermal": 0x20, "hw_thermal": 0x40, "hw_brake": 0x80},
)
"""The bits are NVML's clocks event reasons (nvml.h: nvmlClocksEventReason*)."""
