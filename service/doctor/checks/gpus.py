"""Checks of each GPU, against its like, what it was, and its data sheet."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from search_spaces.hardware import Accelerator
from service.doctor.checks.judged import (
    HISTORY,
    Fault,
    Judged,
    behind,
    each_gpu,
    of_others,
    place,
    sheet_of,
    span,
)
from service.doctor.facts import DeviceFacts, Facts

BEHIND_PEERS, BEHIND_ITSELF = 0.05, 0.03
"""How far a GPU may be behind others of its name, which differ by 3% at the power limit, and behind what it was."""


PRODUCTS_SHARE, MEMORY_SHARE = 0.5, 0.7
"""Of the peaks of a data sheet, what any GPU in order attains."""


LAUNCH_S = 10e-6
"""Of one launch, beyond which layouts wait for the host."""


LAUNCH_BEHIND = 0.5
"""How much longer a launch may take than elsewhere."""


CAPPED_CLOCK = 0.9
"""Share of the highest clock below which products are held, where neither power nor heat is said to hold them."""


HELD_SHARE, POWER_SHARE = 0.01, 0.1
"""Shares of the time over which heat, or the power limit, holds a clock down in earnest."""


HISTORY_HEAT_S, HISTORY_BRAKE_S = 60.0, 1.0
"""Seconds since the driver was loaded that are no accident any more."""


LOWER_W = 1.0


PROGRAM_XIDS = ("13", "31", "43", "45")
"""XID errors that a program causes, not the hardware (NVIDIA, XID errors)."""


XID_ADVICE = "look the number up in NVIDIA's list of XID errors"


ANSWERS = {
    "energy_mj": "searches have no joules_per_token by counter",
    "power_w": "searches have no power",
    "sm_clock_mhz": "searches cannot tell a slow clock",
    "gpu_temp_c": "searches have no temperatures",
    "throttle_sw_thermal_ns": "searches cannot tell what heat costs",
}
"""Columns that searches rest on, and what they lack without them."""


GENERATIONS = {"amd": ("throttle_sw_thermal_ns",)}
"""Columns that only some generations of a kind of device have."""


def fields(facts: Facts) -> Judged:
    """Devices answer what searches rest on, and what their like do."""
    faults = []
    gpus = list(each_gpu(facts))
    for node, device in gpus:
        answered = _answered(device)
        for column, lack in ANSWERS.items():
            if column not in answered and column not in GENERATIONS.get(device.info.kind, ()):
                advice = f"update the driver, or leave MIG mode; until then {lack}"
                faults.append(Fault(place(node, device), f"{column} is not answered", "a value", advice))
        others = [_answered(other) for _, other in gpus if other.info.name == device.info.name and other is not device]
        usual = {column for one in others for column in one if sum(column in each for each in others) > len(others) / 2}
        if missing := sorted(usual - answered - set(ANSWERS)):
            advice = "update the driver, or leave MIG mode"
            faults.append(Fault(place(node, device), f"{', '.join(missing)}: no answer", "as its like answer", advice))
    counts = {len(_answered(device)) for _, device in gpus}
    return Judged(f"{span(counts, 'd')} columns answered" if gpus else None, faults)


def power_limit(facts: Facts) -> Judged:
    """Power limits are those of the vendor, and alike."""
    faults, limits = [], []
    for node, device in each_gpu(facts):
        limit = device.info.power_limit_w
        if limit is None:
            continue
        limits.append(limit)
        sheet = sheet_of(device)
        others = of_others(facts, device, lambda one: one.info.power_limit_w)
        known = [device.info.default_power_limit_w, sheet and sheet.power_limit_w, max(others, default=None)]
        usual = next((value for value in known if value), limit)
        if limit < usual - LOWER_W:
            faults.append(
                Fault(
                    place(node, device),
                    f"power limit {limit:.0f} W",
                    f"{usual:.0f} W",
                    "ask the operator whether it is meant; `nvidia-smi -pl` sets it",
                )
            )
    return Judged(f"{span(limits, '.0f')} W" if limits else None, faults)


def clocks(facts: Facts) -> Judged:
    """Clocks under load are what power and heat leave, and those of their like."""
    faults, seen = [], []
    for node, device in each_gpu(facts):
        load = device.load
        if load is None or load.mean_sm_clock_mhz is None:
            continue
        clock = load.mean_sm_clock_mhz
        seen.append(clock)
        highest = device.info.max_sm_clock_mhz
        others = of_others(facts, device, lambda one: None if one.load is None else one.load.mean_sm_clock_mhz)
        usual = statistics.median(others) if others else None
        held = _share(device, "power_cap") > POWER_SHARE or _hot(device) > HELD_SHARE
        expected = None
        if not held and highest and clock < CAPPED_CLOCK * highest:
            expected = f"up to {highest:,.0f} MHz, as neither power nor heat holds it"
        elif usual and clock < (1 - 2 * BEHIND_PEERS) * usual:
            expected = f"{usual:,.0f} MHz, as its like"
        if expected:
            advice = "look for locked clocks: `nvidia-smi -q -d CLOCK`; `nvidia-smi -rgc` frees them"
            faults.append(Fault(place(node, device), f"{clock:,.0f} MHz in matrix products", expected, advice))
    return Judged(f"{span(seen, ',.0f')} MHz in matrix products" if seen else None, faults)


def heat(facts: Facts) -> Judged:
    """Heat holds no clock down, and did not before."""
    faults, seen = [], []
    for node, device in each_gpu(facts):
        peak = None if device.load is None else device.load.peak_gpu_temp_c
        if peak is not None:
            seen.append(peak)
        if (hot := _hot(device)) > HELD_SHARE:
            at = "" if peak is None else f" at {peak:.0f} degC"
            faults.append(
                Fault(
                    place(node, device),
                    f"heat held its clock down for {hot:.0%} of the time{at}",
                    "never",
                    "look at fans, air flow and neighbours, or give it the stage with least to do",
                )
            )
        past = [_seconds(device, cause) for cause in ("sw_thermal", "hw_thermal")]
        brake = _seconds(device, "hw_brake")
        for seconds, bound, what in ((max(past), HISTORY_HEAT_S, "heat"), (brake, HISTORY_BRAKE_S, "the power brake")):
            if seconds > bound:
                faults.append(
                    Fault(
                        place(node, device),
                        f"{what} held its clock down for {seconds:,.0f} s since the driver was loaded",
                        f"less than {bound:.0f} s",
                        "look at cooling and power supply; throttle_ratio of trials says what it costs",
                    )
                )
    return Judged(f"{span(seen, '.0f')} degC at most" if seen else _none_or(facts, "no time lost"), faults)


def ecc(facts: Facts) -> Judged:
    """No memory error that was not corrected."""
    faults, corrected = [], []
    for node, device in each_gpu(facts):
        reading = device.reading
        if reading.get("ecc_corrected") is not None:
            corrected.append(int(reading["ecc_corrected"]))
        if errors := reading.get("ecc_uncorrected"):
            seen = f"{errors:,} memory errors that were not corrected since the driver was loaded"
            advice = "reset the GPU to have rows remapped; have it replaced if they come again"
            faults.append(Fault(place(node, device), seen, "none", advice))
    return Judged(f"none uncorrected, {sum(corrected):,} corrected" if corrected else None, faults)


def xid(facts: Facts) -> Judged:
    """No XID error while the doctor watched, and none of the hardware's in the kernel's log."""
    faults = []
    for node, device in each_gpu(facts):
        if errors := device.reading.get("xid_errors"):
            seen = f"{errors} XID errors while it was watched, the last {device.reading.get('xid')}"
            faults.append(Fault(place(node, device), seen, "none", XID_ADVICE))
    for node in facts.nodes:
        of_hardware = [one for one in node.xids or () if one.split()[0] not in PROGRAM_XIDS]
        if of_hardware:
            seen = f"XID errors in the kernel's log: {', '.join(of_hardware)}"
            faults.append(Fault(node.name, seen, "none", XID_ADVICE))
    unread = {node.name: "the kernel's log may not be read" for node in facts.nodes if node.xids is None}
    gpus = any(True for _ in each_gpu(facts))
    return Judged("none" if gpus else None, faults, unread if gpus else {})


def products(facts: Facts) -> Judged:
    """Matrix products at the power limit are as fast as elsewhere, as before, and as a data sheet has it."""

    def peak(sheet: Accelerator) -> float | None:
        return sheet.peak_flops and PRODUCTS_SHARE * sheet.peak_flops

    judged = _attained(
        facts, "{:,.0f} TFLOP/s", 1e-12, lambda one: one.flops, peak, "see clocks and heat, then swap it"
    )
    failed = [
        Fault(
            place(node, device),
            f"matrix products failed: {device.error}",
            "a result",
            "run `wattune doctor` again; if it stays, reset the GPU or look for its XID errors",
        )
        for node, device in each_gpu(facts)
        if device.error and device.attained is None
    ]
    return Judged(judged.seen, [*judged.faults, *failed])


def memory(facts: Facts) -> Judged:
    """Likewise the bandwidth of memory."""

    def peak(sheet: Accelerator) -> float | None:
        return sheet.memory_bytes_per_s and MEMORY_SHARE * sheet.memory_bytes_per_s

    return _attained(
        facts, "{:,.2f} TB/s", 1e-12, lambda one: one.memory_bytes_per_s, peak, "look for remapped rows and ECC errors"
    )


def launches(facts: Facts) -> Judged:
    """The host launches as fast as layouts need it."""
    faults, seen = [], []
    for node, device in each_gpu(facts):
        if device.attained is None:
            continue
        each = device.attained.launch_s
        seen.append(1e6 * each)
        others = of_others(facts, device, lambda one: None if one.attained is None else one.attained.launch_s)
        usual = statistics.median(others) if others else None
        bound = min(LAUNCH_S, (1 + LAUNCH_BEHIND) * usual) if usual else LAUNCH_S
        if each > bound:
            faults.append(
                Fault(
                    place(node, device),
                    f"{1e6 * each:.1f} us to launch one kernel",
                    f"{1e6 * bound:.1f} us at most",
                    "set the CPU governor to performance, look for what else runs there; compile: true launches less",
                )
            )
    return Judged(f"{span(seen, '.1f')} us to launch one kernel" if seen else None, faults)


def _none_or(facts: Facts, seen: str) -> str | None:
    return seen if any(True for _ in each_gpu(facts)) else None


def _answered(device: DeviceFacts) -> set[str]:
    return {column for column, value in device.reading.items() if value is not None and column != "xid"}


def _share(device: DeviceFacts, cause: str) -> float:
    """Share of the load's time in which a cause held the clock down; 0 where nobody knows."""
    load = device.load
    return 0.0 if load is None else (load.throttle_s.get(cause) or 0.0) / load.duration_s


def _hot(device: DeviceFacts) -> float:
    return max(_share(device, cause) for cause in ("sw_thermal", "hw_thermal"))


def _seconds(device: DeviceFacts, cause: str) -> float:
    """Since the driver was loaded; 0 where nobody counts."""
    return (device.reading.get(f"throttle_{cause}_ns") or 0) / 1e9


def _attained(
    facts: Facts,
    unit: str,
    scale: float,
    figure: Callable[[Any], float],
    least: Callable[[Accelerator], float | None],
    advice: str,
) -> Judged:
    """A figure of each GPU, of an `Attained` and of `Figures` alike: against its like, itself and its data sheet."""
    faults, seen = [], []
    for node, device in each_gpu(facts):
        if device.attained is None:
            continue
        now = figure(device.attained)
        seen.append(now)
        others = of_others(facts, device, lambda one: None if one.attained is None else figure(one.attained))
        past = [figure(one) for one in facts.history.get(device.info.uuid, ())[-HISTORY:]]
        sheet = sheet_of(device)
        floor = None if sheet is None else least(sheet)
        fault = behind(now, others, past, BEHIND_PEERS, BEHIND_ITSELF, floor)
        if fault is not None:
            bound, why = fault
            expected = f"{unit.format(scale * bound)} or more, {why}"
            faults.append(Fault(place(node, device), unit.format(scale * now), expected, advice))
    if not seen:
        return Judged(None)
    low, high = unit.format(scale * min(seen)), unit.format(scale * max(seen))
    return Judged(low if low == high else f"{low.split()[0]} to {high}", faults)
