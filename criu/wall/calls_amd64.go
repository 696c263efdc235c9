package wall

import "golang.org/x/sys/unix"

const (
	archAMD64 = 0xc000003e
	archI386  = 0x40000003
	bitX32    = 0x40000000
)

// native are the numbers of a call by the ways in which a process can make it: of
// x86-64, of x32, and of i386 if it has another number there.
func native(number, i386 uint32) []callNumber {
	return []callNumber{{archAMD64, number}, {archAMD64, number | bitX32}, {archI386, i386}}
}

// calls lead out of a container, or to the kernel's insides, and no engine's usual filter allows
// them: a process of another engine's keeps that engine's, which allows others than ours.
var calls = []call{
	{"open_by_handle_at", native(unix.SYS_OPEN_BY_HANDLE_AT, 342)}, {"bpf", native(unix.SYS_BPF, 357)},
	{"init_module", native(unix.SYS_INIT_MODULE, 128)}, {"finit_module", native(unix.SYS_FINIT_MODULE, 350)},
	{"delete_module", native(unix.SYS_DELETE_MODULE, 129)}, {"kexec_load", native(unix.SYS_KEXEC_LOAD, 283)},
	{"swapon", native(unix.SYS_SWAPON, 87)}, {"acct", native(unix.SYS_ACCT, 51)},
	{"perf_event_open", native(unix.SYS_PERF_EVENT_OPEN, 336)}, {"quotactl", native(unix.SYS_QUOTACTL, 131)},
	{"settimeofday", native(unix.SYS_SETTIMEOFDAY, 79)},
}
