package criu

import (
	"debug/elf"
	"fmt"
	"maps"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/nftables"

	"github.com/agentbox/agentbox/criu/host"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/fsx"
)

// ConfigAnnotation is the annotation of a bundle from which runc and crun take
// the path of CRIU's configuration file. CRIU applies the file after the
// runtime's own options, so what stands in it wins. A bundle without it is
// dumped with the file named in the environment, which CRIU applies first.
const ConfigAnnotation = "org.criu.config"

// Ways to treat established TCP connections.
const (
	TCPEstablished = "established" // dumped, and live after a restore; the default
	TCPClose       = "close"       // dumped, and closed after a restore
	TCPRefuse      = "refuse"      // make the dump fail
)

// Options are those of CRIU that matter for a container; the zero value is
// the right one for most. The same Options serve the dump and its restore.
type Options struct {
	TCP        string        // default TCPEstablished
	GhostLimit int64         // bytes a deleted file that is still open may have; default DefaultGhostLimit
	Timeout    time.Duration // for stopping all processes; default CRIU's, 10 s. It does not bound the dump itself
	// EmptyNetwork leaves out the contents of the network namespace: the engine that starts the
	// container fills it.
	EmptyNetwork bool
	ScanPaths    []string // files and directories of the container that inotify watches; see Watches

	gone    *goneFiles // of a dump
	severed []uint32   // unix sockets that a dump takes although their peers are not in it
}

// DefaultGhostLimit is generous: browsers, databases and compilers keep large
// temporary files open that they have deleted. CRIU's own limit is 1 MiB.
const DefaultGhostLimit = 1 << 30

// RuntimeFlags are the options in the words of `runc checkpoint` and `runc restore`.
//
// File locks are always taken along; without it one lock fails the dump.
// Not given, on purpose: --shell-job (a terminal that came through a console
// socket is dumped without it), --ext-unix-sk (such an image often cannot be
// restored; better the dump says so, but for the sockets of severance).
func (o Options) RuntimeFlags() []string {
	flags := []string{"--file-locks"}
	if o.TCP == "" || o.TCP == TCPEstablished {
		flags = append(flags, "--tcp-established")
	}
	if o.EmptyNetwork {
		flags = append(flags, "--empty-ns", "network")
	}
	return flags
}

// lines are the options in the words of CRIU's configuration file.
//
// link-remap is among them only for a file on a tmpfs: see goneFiles.
func (o Options) lines() ([]string, error) {
	var lines []string
	switch o.TCP {
	case "", TCPEstablished:
		lines = append(lines, "tcp-established")
	case TCPClose:
		lines = append(lines, "tcp-close") // at the restore too, or that fails
	case TCPRefuse:
	default:
		return nil, fmt.Errorf("tcp %q: %w", o.TCP, fault.ErrInvalid)
	}
	limit := o.GhostLimit
	if limit <= 0 {
		limit = DefaultGhostLimit
	}
	lines = append(lines, "file-locks",
		"skip-in-flight", // a connection half-way through its handshake is dropped, and the client tries again
		fmt.Sprintf("ghost-limit %d", limit))
	if o.Timeout > 0 {
		seconds := int64((o.Timeout + time.Second - 1) / time.Second)
		lines = append(lines, fmt.Sprintf("timeout %d", seconds))
	}
	if lockByNftables() {
		// In CRIU's own process, where the default runs iptables-restore four
		// times: 0.1 s less of standing still. The image says which it was, so
		// a restore needs no such line.
		lines = append(lines, "network-lock nftables")
	}
	if o.gone != nil {
		for _, name := range slices.Sorted(maps.Keys(o.gone.files)) {
			lines = append(lines, "external "+name)
		}
		if o.gone.linked {
			lines = append(lines, "link-remap")
		}
	}
	if len(o.severed) > 0 {
		// Joined by =, for its value is optional. These alone are meant; but where our
		// configuration is the last word it lets any datagram socket pass, see sever.
		list := make([]string, len(o.severed))
		for i, ino := range o.severed {
			list[i] = strconv.FormatUint(uint64(ino), 10)
		}
		lines = append(lines, "ext-unix-sk="+strings.Join(list, ","))
	}
	for _, p := range o.ScanPaths {
		if !filepath.IsAbs(p) || strings.ContainsAny(p, "\"\\\n\x00") {
			continue // the configuration file cannot express it
		}
		lines = append(lines, `irmap-scan-path "`+p+`"`)
	}
	return lines, nil
}

// lockByNftables reports whether CRIU can hold the network still by nftables,
// and be told so. CRIU before 4.2 crashes on the line: it looks for the
// command line that it does not have when a runtime drives it.
var lockByNftables = sync.OnceValue(func() bool {
	path, err := host.Find("criu", nil)
	if err != nil || !hasNftables(path) {
		return false
	}
	out, err := exec.Command(path, "--version").Output()
	var major, minor int
	if n, _ := fmt.Sscanf(string(out), "Version: %d.%d", &major, &minor); err != nil || n != 2 ||
		major*100+minor < 402 {
		return false
	}
	conn, err := nftables.New()
	if err != nil {
		return false
	}
	_, err = conn.ListTables() // an error when the kernel has no nf_tables
	return err == nil
})

// hasNftables reports whether a criu is linked with libnftables.
func hasNftables(path string) bool {
	f, err := elf.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	libs, err := f.ImportedLibraries()
	return err == nil && slices.ContainsFunc(libs, func(l string) bool {
		return strings.HasPrefix(l, "libnftables.so")
	})
}

// WriteConfig publishes CRIU's configuration file for o at path.
func WriteConfig(path string, o Options) error {
	lines, err := o.lines()
	if err != nil {
		return err
	}
	text := strings.Join(lines, "\n") + "\n"
	// Not fsynced: it is written anew before each dump and restore.
	if err := fsx.Write(path, []byte(text), fsx.Options{Volatile: true}); err != nil {
		return fmt.Errorf("criu configuration: %w", err)
	}
	return nil
}
