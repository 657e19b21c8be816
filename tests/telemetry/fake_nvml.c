/* A stand-in for the driver's libnvidia-ml.so.1, scripted by environment variables:
   FAKE_DRIVER  version string            FAKE_INIT        what nvmlInitWithFlags returns
   FAKE_GPUS    how many GPUs             FAKE_DEAD        index of a GPU that does not answer from the start
   FAKE_LOST    batched reads before the GPU is lost
   FAKE_FIELDS  "all", "none" (every field and query NotSupported) or "odd" (values that must not be believed) */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, GPU_IS_LOST = 15 };
enum { DOUBLE = 0, UINT = 1, ULONGLONG = 3, SIGNED_LONGLONG = 4 };

typedef struct {
    unsigned int fieldId, scopeId;
    long long timestamp, latencyUsec;
    unsigned int valueType, nvmlReturn;
    union { double d; unsigned int ui; unsigned long ul; unsigned long long ull; long long sll; int si; unsigned short us; } value;
} FieldValue;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned int gpu, memory; } Utilization;

static long reads = 0;

static const char *setting(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value ? value : otherwise;
}
static int fields_are(const char *mode) { return strcmp(setting("FAKE_FIELDS", "all"), mode) == 0; }
static int state(void) {
    if (reads > atol(setting("FAKE_LOST", "1000000"))) return GPU_IS_LOST;
    return fields_are("none") ? NOT_SUPPORTED : SUCCESS;
}
static int driver_is_renumbered(void) {
    int major = 0, minor = 0;
    sscanf(setting("FAKE_DRIVER", "580.65.06"), "%d.%d", &major, &minor);
    return major > 580 || (major == 580 && minor >= 82);
}

const char *nvmlErrorString(int result) { return result == GPU_IS_LOST ? "GPU is lost" : "error"; }
int nvmlInitWithFlags(unsigned int flags) { (void)flags; return atoi(setting("FAKE_INIT", "0")); }
int nvmlSystemGetDriverVersion(char *version, unsigned int length) {
    snprintf(version, length, "%s", setting("FAKE_DRIVER", "580.65.06"));
    return SUCCESS;
}
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = atoi(setting("FAKE_GPUS", "1")); return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) {
    if ((int)index == atoi(setting("FAKE_DEAD", "-1"))) return GPU_IS_LOST;
    *device = (void *)(size_t)(index + 1);
    return SUCCESS;
}
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned int length) {
    snprintf(uuid, length, "GPU-%zu", (size_t)device - 1);
    return SUCCESS;
}
int nvmlDeviceGetName(void *device, char *name, unsigned int length) {
    (void)device;
    snprintf(name, length, "Fake H200");
    return SUCCESS;
}
int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned int *limit) { (void)device; *limit = 700000; return state(); }
int nvmlDeviceGetClockInfo(void *device, int type, unsigned int *clock) {
    (void)device;
    *clock = type == 1 ? 1455 : type == 2 ? 3201 : 1;
    return state();
}
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned int *celsius) {
    (void)device;
    *celsius = sensor == 0 ? 61 : 1;
    return state();
}
int nvmlDeviceGetUtilizationRates(void *device, Utilization *rates) {
    (void)device;
    rates->gpu = 97;
    rates->memory = 40;
    return state();
}
int nvmlDeviceGetMemoryInfo(void *device, Memory *memory) {
    (void)device;
    memory->total = 141ULL << 30;
    memory->used = 12ULL << 30;
    memory->free = memory->total - memory->used;
    return state();
}
int nvmlDeviceGetCurrentClocksEventReasons(void *device, unsigned long long *reasons) {
    (void)device;
    *reasons = 0x24;
    return state();
}

static void count(FieldValue *field, unsigned long long value) {
    field->valueType = ULONGLONG;
    field->value.ull = value;
}
static void gauge(FieldValue *field, unsigned int value) {
    field->valueType = UINT;
    field->value.ui = value;
}
int nvmlDeviceGetFieldValues(void *device, int length, FieldValue *fields) {
    (void)device;
    reads++;
    if (state() == GPU_IS_LOST) return GPU_IS_LOST;
    for (int i = 0; i < length; i++) {
        FieldValue *field = &fields[i];
        gauge(field, 0); /* as the real driver leaves what it does not support */
        field->nvmlReturn = state();
        if (state() != SUCCESS) continue;
        switch (field->fieldId) {
            case 83: count(field, (1ULL << 40) + 70000 * reads); break;
            case 185: gauge(field, 690123); break;
            case 186: gauge(field, 700456); break;
            case 82: gauge(field, 71); break;
            case 74: count(field, 7400000000ULL); break;
            case 75: count(field, 75); break;
            case 76: count(field, 76); break;
            case 251: case 252: case 253: /* another quantity since the renumbering */
                if (driver_is_renumbered()) gauge(field, 424242);
                else count(field, field->fieldId * 1000000000ULL);
                break;
            case 269: case 270: case 271:
                if (driver_is_renumbered()) count(field, field->fieldId * 1000000000ULL);
                else field->nvmlReturn = INVALID_ARGUMENT;
                break;
            default: field->nvmlReturn = INVALID_ARGUMENT;
        }
        if (!fields_are("odd")) continue;
        if (field->fieldId == 186) { field->valueType = DOUBLE; field->value.d = NAN; }
        if (field->fieldId == 185) { field->valueType = DOUBLE; field->value.d = 690123.0; }
        if (field->fieldId == 83) { field->valueType = SIGNED_LONGLONG; field->value.sll = -1; }
        if (field->fieldId == 82) field->valueType = 42;
    }
    return SUCCESS;
}
