package policy

// MaskedPaths are what a sandbox cannot read of /proc and /sys, and ReadonlyPaths what it cannot
// write: Docker's lists. They are the same on every host, because a restore needs a place for
// every mount of the dump; that leaves out Docker's thermal_throttle of each core. Each directory
// that exists also costs a dump about 20 ms.
var (
	MaskedPaths = []string{
		"/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
		"/proc/sched_debug", "/proc/scsi", "/proc/timer_list", "/proc/timer_stats",
		"/sys/devices/virtual/powercap", "/sys/firmware",
	}
	ReadonlyPaths = []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/pressure", "/proc/sys", "/proc/sysrq-trigger"}
)
