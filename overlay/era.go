package overlay

import (
	"crypto/rand"
	"fmt"
	"os"
	"strings"
	"sync"

	"github.com/zeebo/blake3"
)

// An era is the time for which the kernel's view of a filesystem, from its caches where it has
// some, is the filesystem: until the power or the disk fails. What was in the caches alone is
// lost then. The change time of a file that was written in place reaches the disk with the
// journal, often long before its data does, so that afterwards it can stand over older data. No
// inode is recognized by its times from one era to the next.
type era [32]byte

var bootID = sync.OnceValue(func() string {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return rand.Text() // no other process shares this era
	}
	return strings.TrimSpace(string(id))
})

// eraOf returns the era of the filesystem on a device.
func eraOf(major, minor uint32) era {
	// Disks are numbered as they come, partitions are below theirs. Some filesystems
	// are on none, and kernels before 5.15 do not count.
	at := fmt.Sprintf("/sys/dev/block/%d:%d/", major, minor)
	seq, err := os.ReadFile(at + "diskseq")
	if err != nil {
		seq, _ = os.ReadFile(at + "../diskseq")
	}
	return blake3.Sum256([]byte(bootID() + " " + strings.TrimSpace(string(seq))))
}
