"""NVIDIA GPUs, read through NVML."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from typing import Any

from telemetry.devices.base import DeviceInfo

logger = logging.getLogger(__name__)

GIB = 2**30

# Field ids stable over all drivers (nvml.h: NVML_FI_DEV_*), with the factor from NVML's unit to the column's.
_STABLE_FIELDS: dict[str, tuple[int, float | None]] = {
    "energy_mj": (83, None),
    "power_average_w": (185, 1e-3),
    "power_w": (186, 1e-3),
    "hbm_temp_c": (82, 1.0),
    "throttle_power_cap_ns": (74, None),
    "throttle_thermal_policy_ns": (75, None),
    "throttle_sync_boost_ns": (76, None),
}
_RENUMBERED_IN = (580, 82)
_VALUE_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by nvmlValueType_t


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
    """One GPU. The counters of one sample come from a single batched NVML call."""

    def __init__(self, nvml: Any, index: int) -> None:
        self._nvml = nvml
        self._handle = nvml.nvmlDeviceGetHandleByIndex(index)
        driver_version = nvml.nvmlSystemGetDriverVersion()
        limit_mw = self._ask(nvml.nvmlDeviceGetEnforcedPowerLimit)
        self.info = DeviceInfo(
            uuid=nvml.nvmlDeviceGetUUID(self._handle),
            index=index,
            name=nvml.nvmlDeviceGetName(self._handle),
            kind="nvidia",
            energy_method="counter",
            driver_version=driver_version,
            power_limit_w=None if limit_mw is None else limit_mw / 1000,
        )
        self._fields = _STABLE_FIELDS | {
            column: (field_id, None) for column, field_id in throttle_field_ids(driver_version).items()
        }
        self._field_ids = [field_id for field_id, _ in self._fields.values()]

    def read(self, full: bool) -> dict[str, Any]:
        nvml = self._nvml
        counters = self._read_fields()  # first, as close to the sample's time as can be
        utilisation = self._ask(nvml.nvmlDeviceGetUtilizationRates)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo)
        return counters | {
            "sm_clock_mhz": self._ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            "memory_clock_mhz": self._ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
            "gpu_temp_c": self._ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            "gpu_utilisation": None if utilisation is None else utilisation.gpu / 100,
            "memory_used_gib": None if memory is None else memory.used / GIB,
            "throttle_reasons": self._ask(nvml.nvmlDeviceGetCurrentClocksEventReasons),
        }

    def _read_fields(self) -> dict[str, Any]:
        values = self._ask(self._nvml.nvmlDeviceGetFieldValues, self._field_ids)
        if values is None:
            return {}
        return {
            column: _field_value(value, factor)
            for (column, (_, factor)), value in zip(self._fields.items(), values, strict=True)
        }

    def _ask(self, query: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return query(self._handle, *arguments)
        except self._nvml.NVMLError:
            return None


def _field_value(field: Any, factor: float | None) -> float | int | None:
    """The value of an nvmlFieldValue_t, None unless NVML vouches for it; a counter (no factor) is a whole number."""
    if field.nvmlReturn != 0 or not 0 <= field.valueType < len(_VALUE_MEMBERS):
        return None
    value = getattr(field.value, _VALUE_MEMBERS[field.valueType])
    if not math.isfinite(value) or value < 0:
        return None
    return int(value) if factor is None else value * factor


def discover() -> list[NvidiaDevice]:
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
