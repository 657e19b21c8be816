/* A stand-in for ROCm's libamd_smi.so, scripted by environment variables:
   FAKE_MODEL   "mi250" (two cards of two dies) or "mi300" (two GPUs)
   FAKE_INIT    what amdsmi_init returns
   FAKE_HIDDEN  place on the bus of a GPU that is not shown   FAKE_DEAD   of one that never answers
   FAKE_LOST    metrics reads of a GPU before it falls off the bus
   FAKE_HANG    the metrics read of a GPU that takes 0.4 s
   FAKE_RESET   metrics reads of a GPU before its counters start again
   FAKE_ENERGY  the energy accumulator at the start           FAKE_BUSY   share of the ticks throttled, in percent
   FAKE_FIELDS  "all", "none" (every field and query not supported), "odd" (units that are not the documented ones),
                "partition" (one of eight) or "short" (a library that does not know the table's later fields)
   What the binding wants beyond these functions is NOT_SUPPORTED, by weak definitions that the test adds. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 2, IO = 12, NOT_FOUND = 31 };
enum { MOST = 4, SHOWN_FIRST = 2 };

typedef struct { uint16_t size; uint8_t format, content; } Header;
typedef struct {
    uint32_t gfx_busy[8]; uint16_t jpeg_busy[40], vcn_busy[4];
    uint64_t busy_acc[8], below_limit[8], below_limit_ppt[8], below_limit_thm[8], low_use[8], below_limit_total[8];
} Partition;
typedef struct {
    Header header;
    uint16_t temperature_edge, temperature_hotspot, temperature_mem, temperature_vr[3];
    uint16_t gfx_activity, umc_activity, mm_activity, average_socket_power;
    uint64_t energy_accumulator, system_clock_counter;
    uint16_t average_clocks[7], gfxclk, socclk, uclk, vclk0, dclk0, vclk1, dclk1;
    uint32_t throttle_status;
    uint16_t fan_speed, pcie_width, pcie_speed;
    uint32_t gfx_activity_acc, mem_activity_acc;
    uint16_t temperature_hbm[4];
    uint64_t firmware_timestamp;
    uint16_t voltages[3];
    uint64_t indep_throttle_status;
    uint16_t socket_power, vcn_activity[4];
    uint32_t gfxclk_lock_status;
    uint16_t xgmi_width, xgmi_speed;
    uint64_t pcie[5], xgmi_read[8], xgmi_write[8];
    uint16_t gfxclks[8], socclks[4], vclk0s[4], dclk0s[4], jpeg_activity[32];
    uint32_t nak_sent, nak_received;
    uint64_t ticks, prochot, ppt, socket_thm, vr_thm, hbm_thm;
    uint16_t num_partition;
    Partition partitions[8];
    uint32_t pcie_recovery;
    uint64_t vram_max_bandwidth;
    uint16_t xgmi_link_status[8];
} Metrics;
typedef struct {
    char market_name[256]; uint32_t vendor_id; char vendor_name[256]; uint32_t subvendor_id; uint64_t device_id;
    uint32_t rev_id; char asic_serial[256]; uint32_t oam_id, compute_units; uint64_t graphics_version;
    uint32_t subsystem_id, reserved[21];
} Asic;
typedef struct { uint32_t drm_render, drm_card, hsa_id, hip_id; char hip_uuid[256]; } Enumeration;
typedef struct { char version[256], date[256], name[256]; } Driver;
typedef struct { uint64_t corrected, uncorrected, deferred, reserved[5]; } Errors;
typedef struct { uint64_t cap, default_cap, dpm_cap, min_cap, max_cap, reserved[3]; } PowerCap;

/* Numbered by place on the bus; shown in another order, as AMD SMI's and HIP's do differ. */
static const unsigned buses[MOST] = {0xc1, 0xc6, 0xc9, 0xce};
static long reads[MOST];

static const char *setting(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value ? value : otherwise;
}
static long number(const char *name, const char *otherwise) { return atol(setting(name, otherwise)); }
static int fields_are(const char *mode) { return strcmp(setting("FAKE_FIELDS", "all"), mode) == 0; }
static int mi250(void) { return strcmp(setting("FAKE_MODEL", "mi300"), "mi250") == 0; }
static int gpus(void) { return mi250() ? 4 : 2; }
static int place(void *handle) { return (int)(size_t)handle - 1; }
static int reports(int gpu) { return !mi250() || gpu % 2 == 0; }
static int state(void *handle) {
    if (place(handle) == number("FAKE_DEAD", "-1")) return NOT_FOUND;
    if (reads[place(handle)] > number("FAKE_LOST", "1000000")) return IO;
    return SUCCESS;
}
static int supported(void *handle) { return state(handle) ? state(handle) : fields_are("none") ? NOT_SUPPORTED : SUCCESS; }

int amdsmi_init(uint64_t flags) { (void)flags; return (int)number("FAKE_INIT", "0"); }
int amdsmi_get_socket_handles(uint32_t *count, void **sockets) {
    uint32_t shown = 0;
    for (int i = 0; i < gpus(); i++) {
        int gpu = (i + SHOWN_FIRST) % gpus();
        if (gpu == number("FAKE_HIDDEN", "-1")) continue;
        if (sockets) sockets[shown] = (void *)(size_t)(gpu + 1);
        shown++;
    }
    *count = shown;
    return SUCCESS;
}
int amdsmi_get_processor_handles(void *socket, uint32_t *count, void **processors) {
    if (processors) processors[0] = socket;
    *count = 1;
    return SUCCESS;
}
int amdsmi_get_gpu_device_bdf(void *handle, uint64_t *bdf) {
    *bdf = (uint64_t)buses[place(handle)] << 8;
    return state(handle);
}
int amdsmi_get_gpu_asic_info(void *handle, Asic *asic) {
    memset(asic, 0, sizeof *asic);
    snprintf(asic->market_name, sizeof asic->market_name, "Fake %s", mi250() ? "MI250X" : "MI300X");
    snprintf(asic->asic_serial, sizeof asic->asic_serial, "0x%x", place(handle));
    asic->device_id = mi250() ? 0x7408 : 0x74a1;
    return state(handle);
}
int amdsmi_get_gpu_enumeration_info(void *handle, Enumeration *info) {
    memset(info, 0, sizeof *info);
    if (fields_are("odd")) snprintf(info->hip_uuid, sizeof info->hip_uuid, "GPU-XX");
    else snprintf(info->hip_uuid, sizeof info->hip_uuid, "GPU-61b786e239c9c39%x", place(handle));
    return state(handle);
}
int amdsmi_get_gpu_driver_info(void *handle, Driver *driver) {
    memset(driver, 0, sizeof *driver);
    snprintf(driver->version, sizeof driver->version, "6.14.14");
    return supported(handle);
}
int amdsmi_get_power_cap_info(void *handle, uint32_t sensor, PowerCap *cap) {
    (void)sensor;
    memset(cap, 0, sizeof *cap);
    if (reports(place(handle))) cap->cap = fields_are("odd") ? 750 : mi250() ? 560000000 : 750000000;
    return supported(handle);
}
int amdsmi_get_gpu_memory_usage(void *handle, uint32_t kind, uint64_t *used) {
    (void)kind;
    *used = 12ULL << 30;
    return supported(handle);
}
int amdsmi_get_temp_metric(void *handle, uint32_t sensor, uint32_t metric, int64_t *value) {
    int hotspot = 1, critical = 5;
    *value = fields_are("odd") ? 100000 : 100;
    return sensor == hotspot && metric == critical ? supported(handle) : NOT_SUPPORTED;
}
int amdsmi_get_gpu_total_ecc_count(void *handle, Errors *errors) {
    memset(errors, 0, sizeof *errors);
    errors->corrected = 7;
    errors->uncorrected = 2;
    errors->deferred = 1;
    return supported(handle);
}
int amdsmi_get_gpu_metrics_info(void *handle, Metrics *answer) {
    Metrics table, *metrics = &table;
    int gpu = place(handle);
    long read = ++reads[gpu];
    if (read == number("FAKE_HANG", "-1")) usleep(400000);
    if (state(handle)) return state(handle);
    memset(metrics, 0xFF, sizeof *metrics);
    long since = read <= number("FAKE_RESET", "1000000") ? read : read - number("FAKE_RESET", "1000000");
    uint64_t start = since == read ? strtoull(setting("FAKE_ENERGY", "1099511627776"), NULL, 10) : 1;
    metrics->energy_accumulator = reports(gpu) ? start + (uint64_t)since * 1000000 : 0;
    metrics->temperature_hotspot = 61 + gpu;
    metrics->gfx_activity = 97;
    metrics->uclk = mi250() ? 1600 : 1300;
    metrics->throttle_status = 0;
    if (mi250()) {
        metrics->average_socket_power = reports(gpu) ? 500 : 0;
        metrics->temperature_edge = 50;
        metrics->temperature_mem = 58;
        for (int i = 0; i < 4; i++) metrics->temperature_hbm[i] = i == 2 ? 59 : 0;
        metrics->gfxclk = 1650;
        metrics->indep_throttle_status = 1ULL << 34 | 1;
    } else {
        metrics->socket_power = 700;
        metrics->temperature_mem = 66;
        metrics->gfxclks[0] = 2000;
        metrics->gfxclks[1] = 2100;
        metrics->num_partition = 1;
        metrics->xgmi_width = 16;
        metrics->xgmi_speed = 32;
        for (int link = 0; link < 7; link++) {
            metrics->xgmi_read[link] = (uint64_t)since * 1000;
            metrics->xgmi_write[link] = (uint64_t)since * 500;
            metrics->xgmi_link_status[link] = link < 6;
        }
        uint64_t ticks = (uint64_t)since * 100, busy = ticks * (uint64_t)number("FAKE_BUSY", "50") / 100;
        metrics->ticks = ticks;
        metrics->ppt = busy;
        metrics->prochot = 0;
        metrics->socket_thm = busy / 2;
        metrics->vr_thm = 0;
        metrics->hbm_thm = busy / 5;
    }
    if (fields_are("odd")) {
        metrics->socket_power = 52000;
        metrics->temperature_hotspot = 6100;
        metrics->temperature_edge = 55;
        metrics->temperature_mem = 0;
        metrics->gfx_activity = 9700;
        metrics->uclk = 13000;
        metrics->num_partition = 1;
        metrics->hbm_thm = UINT64_MAX;
    }
    if (fields_are("partition")) metrics->num_partition = 8;
    if (fields_are("none")) memset(metrics, 0xFF, sizeof *metrics);
    memcpy(answer, metrics, fields_are("short") ? offsetof(Metrics, socket_power) : sizeof *metrics);
    return SUCCESS;
}
