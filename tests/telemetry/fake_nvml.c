/* A stand-in for the driver's libnvidia-ml.so.1, scripted by environment variables that may change between calls:
   FAKE_DRIVER  version string            FAKE_INIT        what nvmlInitWithFlags returns
   FAKE_GPUS    how many GPUs             FAKE_DEAD        index of a GPU that does not answer from the start
   FAKE_LOST    index of the GPU that has fallen off the bus; 100 more: its fields say so one by one
   FAKE_FIELDS  "all", "none" (every field and query NotSupported), "odd" (values that must not be believed),
                "mig" (what a GPU in MIG mode refuses is refused)
   FAKE_HANG    seconds that the next batched call of GPU 0 takes, and that one alone
   FAKE_GPM     1 if the GPU has GPM, 2 if its samples take 60 ms, 3 if it fails
   FAKE_ENERGY, FAKE_CAP, FAKE_PCIE, FAKE_TENSOR, FAKE_ECC   what counters and GPM have come to
   FAKE_REFRESH ms after which a counter of 700 W is refreshed, every 100 ms by the monotonic clock, or every FAKE_PERIOD
   FAKE_XID     numbers of the XID errors since the last look, separated by spaces
   FAKE_LINKS   active NVLinks            FAKE_SPEED       their common speed
   FAKE_LIMIT   power limit in W          FAKE_CLOCK       SM clock in MHz
   FAKE_BUSY    utilisation in percent    FAKE_MEMORY      memory in use in GiB
                of these, of links and of the next two there may be a list, by GPU, the last of which is that of all further ones
   FAKE_SETTABLE what setting a power limit returns; FAKE_SET a folder with a file for each GPU whose limit was set
   FAKE_UNCORRECTED memory errors that were not corrected, beyond FAKE_ECC
   FAKE_HEAT    ns for which heat is counted to have slowed the GPU, by software and by hardware
   FAKE_CALLS   file to which each batched call adds the ids that it asked for, a call for the utilisation "utilisation" */
#define _GNU_SOURCE
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, TIMEOUT = 10, GPU_IS_LOST = 15, UNKNOWN = 999 };
enum { DOUBLE = 0, UINT = 1, ULONGLONG = 3, SIGNED_LONGLONG = 4 };

typedef struct {
    unsigned int fieldId, scopeId;
    long long timestamp, latencyUsec;
    unsigned int valueType, nvmlReturn;
    union { double d; unsigned int ui; unsigned long ul; unsigned long long ull; long long sll; int si; unsigned short us; } value;
} FieldValue;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned int gpu, memory; } Utilization;
typedef struct { unsigned int version; int margin; } Margin;
typedef struct { void *device; unsigned long long type, data; unsigned int gpuInstance, computeInstance; } Event;
typedef struct { unsigned int version, isSupported; } GpmSupport;
typedef struct { double seconds; unsigned long long bytes, tensor; } GpmSample;
typedef struct { unsigned int id, result; double value; char *names[3]; } GpmMetric;
typedef struct { unsigned int version, count; GpmSample *before, *now; GpmMetric metrics[]; } GpmRequest;

static const char *setting(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value ? value : otherwise;
}
static unsigned long long number(const char *name, const char *otherwise) { return strtoull(setting(name, otherwise), NULL, 10); }
/* That of the device's place in a list. */
static unsigned long long number_of(void *device, const char *name, const char *otherwise) {
    const char *list = setting(name, otherwise);
    for (int i = (int)(size_t)device - 1; i > 0 && strchr(list, ' '); i--) list = strchr(list, ' ') + 1;
    return strtoull(list, NULL, 10);
}
static int fields_are(const char *mode) { return strcmp(setting("FAKE_FIELDS", "all"), mode) == 0; }
static int index_of(void *device) { return (int)(size_t)device - 1; }
static int lost(void *device) { return atoi(setting("FAKE_LOST", "-1")) % 100 == index_of(device); }
static int lost_by_field(void) { return atoi(setting("FAKE_LOST", "-1")) >= 100; }
static int state(void *device) {
    if (lost(device)) return GPU_IS_LOST;
    return fields_are("none") ? NOT_SUPPORTED : SUCCESS;
}
static int state_unless_mig(void *device) { return fields_are("mig") ? NOT_SUPPORTED : state(device); }
static void hang(void) {
    double seconds = atof(setting("FAKE_HANG", "0"));
    unsetenv("FAKE_HANG");
    usleep(1000000 * seconds);
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
    snprintf(uuid, length, "GPU-%d", index_of(device));
    return SUCCESS;
}
int nvmlDeviceGetName(void *device, char *name, unsigned int length) {
    (void)device;
    snprintf(name, length, "Fake H200");
    return SUCCESS;
}
int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned int *limit) {
    *limit = 1000 * number_of(device, "FAKE_LIMIT", "700");
    return state(device);
}
/* What was set outlives the process that did so, as a driver's does. */
static FILE *limit_file(void *device, const char *mode) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%d", setting("FAKE_SET", "/nonexistent"), index_of(device));
    return fopen(path, mode);
}
int nvmlDeviceGetPowerManagementLimit(void *device, unsigned int *limit) {
    FILE *file = limit_file(device, "r");
    *limit = 1000 * number_of(device, "FAKE_LIMIT", "700");
    if (file) {
        if (fscanf(file, "%u", limit) != 1) *limit = 0;
        fclose(file);
    }
    return state(device);
}
int nvmlDeviceGetPowerManagementLimitConstraints(void *device, unsigned int *least, unsigned int *highest) {
    *least = 200000;
    *highest = 700000;
    return state(device);
}
int nvmlDeviceSetPowerManagementLimit(void *device, unsigned int limit) {
    FILE *file;
    if (number("FAKE_SETTABLE", "0")) return number("FAKE_SETTABLE", "0");
    file = limit_file(device, "w");
    if (!file) return UNKNOWN;
    fprintf(file, "%u", limit);
    fclose(file);
    return state(device);
}
int nvmlDeviceGetPowerManagementDefaultLimit(void *device, unsigned int *limit) {
    *limit = 700000;
    return state(device);
}
int nvmlDeviceGetMaxClockInfo(void *device, int type, unsigned int *clock) {
    *clock = type == 1 ? 1980 : 1;
    return state(device);
}
int nvmlDeviceGetMaxPcieLinkGeneration(void *device, unsigned int *generation) {
    *generation = fields_are("odd") ? 9 : number("FAKE_GENERATION", "5");
    return state(device);
}
int nvmlDeviceGetMaxPcieLinkWidth(void *device, unsigned int *width) { *width = 16; return state(device); }
int nvmlDeviceGetNvLinkState(void *device, unsigned int link, unsigned int *active) {
    if (link >= 18) return INVALID_ARGUMENT;
    *active = link < number_of(device, "FAKE_LINKS", "0");
    return state(device);
}
int nvmlDeviceGetClockInfo(void *device, int type, unsigned int *clock) {
    *clock = type == 1 ? number_of(device, "FAKE_CLOCK", "1455") : type == 2 ? 3201 : 1;
    return state(device);
}
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned int *celsius) {
    *celsius = sensor == 0 ? 61 : 1;
    return state(device);
}
int nvmlDeviceGetMarginTemperature(void *device, Margin *margin) {
    if (margin->version != 0x1000008) return INVALID_ARGUMENT;
    margin->margin = 29;
    return state(device);
}
static FILE *calls(void) { return fopen(setting("FAKE_CALLS", "/dev/null"), "a"); }
int nvmlDeviceGetUtilizationRates(void *device, Utilization *rates) {
    FILE *log = calls();
    fprintf(log, "utilisation\n");
    fclose(log);
    rates->gpu = fields_are("odd") ? (unsigned int)-1 : number_of(device, "FAKE_BUSY", "97");
    rates->memory = 40;
    return state_unless_mig(device);
}
int nvmlDeviceGetMemoryInfo(void *device, Memory *memory) {
    memory->total = 141ULL << 30;
    memory->used = number_of(device, "FAKE_MEMORY", "12") << 30;
    memory->free = memory->total - memory->used;
    return state(device);
}
int nvmlDeviceGetCurrentClocksEventReasons(void *device, unsigned long long *reasons) {
    *reasons = 0x24;
    return state(device);
}
int nvmlDeviceGetTotalEccErrors(void *device, int type, int counter, unsigned long long *errors) {
    *errors = counter == 0 ? number("FAKE_ECC", "0") + type * number_of(device, "FAKE_UNCORRECTED", "1000") : 77;
    return fields_are("odd") ? UNKNOWN : state(device);
}

int nvmlEventSetCreate(void **set) { *set = calloc(1, sizeof(int)); return SUCCESS; }
int nvmlDeviceRegisterEvents(void *device, unsigned long long types, void *set) {
    if (types != 8) return INVALID_ARGUMENT;
    *(int *)set = index_of(device);
    return fields_are("none") ? NOT_SUPPORTED : SUCCESS;
}
int nvmlEventSetWait_v2(void *set, Event *event, unsigned int milliseconds) {
    char *rest;
    unsigned long long xid = strtoull(setting("FAKE_XID", ""), &rest, 10);
    if (milliseconds) usleep(milliseconds * 1000);
    if (*(int *)set != 0 || xid == 0) return lost_by_field() && *(int *)set == 0 ? GPU_IS_LOST : TIMEOUT;
    event->type = 8;
    event->data = xid;
    rest = strdup(rest);
    setenv("FAKE_XID", rest, 1);
    free(rest);
    return SUCCESS;
}

int nvmlGpmQueryDeviceSupport(void *device, GpmSupport *support) {
    if (support->version != 1) return INVALID_ARGUMENT;
    support->isSupported = number("FAKE_GPM", "1") > 0;
    return state(device);
}
int nvmlGpmSampleAlloc(GpmSample **sample) { *sample = calloc(1, sizeof **sample); return SUCCESS; }
int nvmlGpmSampleGet(void *device, GpmSample *sample) {
    struct timespec now;
    if (number("FAKE_GPM", "1") == 2) usleep(60000);
    if (number("FAKE_GPM", "1") == 3) return UNKNOWN;
    clock_gettime(CLOCK_MONOTONIC, &now);
    sample->seconds = now.tv_sec + now.tv_nsec / 1e9;
    sample->bytes = number("FAKE_PCIE", "0");
    sample->tensor = number("FAKE_TENSOR", "0");
    return state_unless_mig(device);
}
int nvmlGpmMetricsGet(GpmRequest *request) {
    double seconds = request->now->seconds - request->before->seconds;
    double mib_per_s = ((double)request->now->bytes - (double)request->before->bytes) / 1048576 / seconds;
    double percent = (double)request->now->tensor - (double)request->before->tensor;
    if (request->version != 1) return INVALID_ARGUMENT;
    for (unsigned int i = 0; i < request->count; i++) {
        GpmMetric *metric = &request->metrics[i];
        metric->result = SUCCESS;
        switch (metric->id) {
            case 5: metric->value = percent; break;
            case 10: metric->value = percent / 2; break;
            case 20: metric->value = mib_per_s; break;
            case 21: metric->value = 2 * mib_per_s; break;
            case 60: metric->value = 3 * mib_per_s; break;
            case 61: metric->value = 4 * mib_per_s; break;
            default: metric->result = INVALID_ARGUMENT;
        }
        if (metric->id >= 60 && number("FAKE_LINKS", "0") == 0) metric->result = NOT_SUPPORTED;
    }
    return SUCCESS;
}

static unsigned long long energy_mj(void) {
    long long period = number("FAKE_PERIOD", "100"), phase = atoi(setting("FAKE_REFRESH", "-1"));
    struct timespec now;
    if (phase < 0) return number("FAKE_ENERGY", "70000");
    clock_gettime(CLOCK_MONOTONIC, &now);
    return ((now.tv_sec * 1000LL + now.tv_nsec / 1000000 - phase) / period) * period * 700;
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
    if (length <= 0) return INVALID_ARGUMENT;
    FILE *log = calls();
    for (int i = 0; i < length; i++) fprintf(log, "%u%c", fields[i].fieldId, i < length - 1 ? ' ' : '\n');
    fclose(log);
    if (index_of(device) == 0) hang();
    if (lost(device) && !lost_by_field()) return GPU_IS_LOST;
    for (int i = 0; i < length; i++) {
        FieldValue *field = &fields[i];
        if (fields_are("odd") && field->fieldId == 76) continue; /* left as it was */
        gauge(field, 0); /* as the real driver leaves what it does not support */
        field->nvmlReturn = state(device);
        if (state(device) != SUCCESS) continue;
        switch (field->fieldId) {
            case 83: count(field, energy_mj()); break;
            case 185: gauge(field, field->scopeId == 2 ? 88012 : 690123); break;
            case 186: gauge(field, 700456); break;
            case 82: gauge(field, 71); break;
            case 74: count(field, number("FAKE_CAP", "7400000000")); break;
            case 75: count(field, 75); break;
            case 76: count(field, 76); break;
            case 251: case 252: case 253: /* another quantity since the renumbering */
                if (driver_is_renumbered()) gauge(field, 424242);
                else count(field, getenv("FAKE_HEAT") ? number_of(device, "FAKE_HEAT", "0") : field->fieldId * 1000000000ULL);
                break;
            case 269: case 270: case 271:
                if (driver_is_renumbered())
                    count(field, getenv("FAKE_HEAT") ? number_of(device, "FAKE_HEAT", "0") : field->fieldId * 1000000000ULL);
                else field->nvmlReturn = INVALID_ARGUMENT;
                break;
            case 90: gauge(field, number("FAKE_SPEED", "26562")); break;
            case 164: gauge(field, field->scopeId == 0 ? 20000 : 0); break;
            case 138: case 139:
                if (field->scopeId == 0xffffffffU) count(field, field->fieldId * number("FAKE_PCIE", "0"));
                break;
            case 197: case 198: count(field, (unsigned int)(number("FAKE_PCIE", "0") * (field->fieldId - 196))); break;
            default: field->nvmlReturn = INVALID_ARGUMENT;
        }
        if (fields_are("mig") && (field->fieldId == 83 || field->fieldId == 82)) {
            gauge(field, 0);
            field->nvmlReturn = NOT_SUPPORTED;
        }
        if (!fields_are("odd")) continue;
        if (field->fieldId == 186) { field->valueType = DOUBLE; field->value.d = NAN; }
        if (field->fieldId == 185) { field->valueType = DOUBLE; field->value.d = 690123.0; }
        if (field->fieldId == 83) { field->valueType = SIGNED_LONGLONG; field->value.sll = -1; }
        if (field->fieldId == 82) field->valueType = 42;
        if (field->fieldId == 75) field->nvmlReturn = UNKNOWN;
    }
    return SUCCESS;
}
