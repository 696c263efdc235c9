package policy

// MaskedPaths are what nobody in a sandbox can read of /proc and /sys, and
// ReadonlyPaths what nobody can write: Docker's. They are the same on every
// host, since a restore wants every mount of the dump to have its place: that
// leaves out Docker's thermal_throttle of each core. Each directory that is
// there also costs a dump about 20 ms.
var (
	MaskedPaths = []string{
		"/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
		"/proc/sched_debug", "/proc/scsi", "/proc/timer_list", "/proc/timer_stats",
		"/sys/devices/virtual/powercap", "/sys/firmware",
	}
	ReadonlyPaths = []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/pressure", "/proc/sys", "/proc/sysrq-trigger"}
)
