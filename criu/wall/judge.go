package wall

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"sync"
	"syscall"

	"github.com/agentbox/agentbox/internal/fault"
)

// Bounds. Images of pages and of what waits in pipes and sockets are not read here.
const (
	maxImage   = 256 << 20 // bytes of one that is
	maxEntry   = 4 << 20
	maxEntries = 1 << 20 // of an image
	maxImages  = 1 << 20 // files
)

// Magic numbers that begin an image: a common one, which an inventory does not have,
// then its kind's.
const (
	magicCommon    = 0x54564319
	magicInventory = 0x58313116
	magicPstree    = 0x50273030
	magicIDs       = 0x54432030
	magicCore      = 0x55053847
	magicMounts    = 0x55563928
	magicCgroup    = 0x59383330
	magicUserns    = 0x55474906
	magicSeccomp   = 0x64413049
	magicFiles     = 0x56303138
	magicGhost     = 0x52583605
	magicNetns     = 0x55933752
	magicNetdev    = 0x57373951
	magicTTY       = 0x59453036
	magicUtsns     = 0x54473203
	magicFdinfo    = 0x56213732
	magicMM        = 0x57492820
	magicFS        = 0x51403912
	magicTimens    = 0x43114433
	magicPidns     = 0x61157326
	magicIPCVar    = 0x53115007
	magicRemap     = 0x59133954
	magicLocks     = 0x54323616
	magicMemfd     = 0x48453499
)

type kind struct {
	name *regexp.Regexp
	// judge reads the image; nil: all that it has stays in the container's own memory,
	// namespaces and descriptors.
	judge func(*judge, string) error
}

// kinds are the images that a dump has. One that is not here is refused: CRIU might
// read it, with effects that are not known.
var kinds = sync.OnceValue(func() []kind {
	return []kind{
		{named(`inventory\.img`), (*judge).inventory},
		{named(`pstree\.img`), (*judge).pstree},
		{named(`ids-\d+\.img`), (*judge).ids},
		{named(`core-\d+\.img`), (*judge).core},
		{named(`mountpoints-\d+\.img`), (*judge).mountpoints},
		{named(`cgroup\.img`), (*judge).cgroup},
		{named(`userns-\d+\.img`), (*judge).userns},
		{named(`seccomp\.img`), (*judge).seccomp},
		{named(`files\.img`), (*judge).files},
		{named(`ghost-file-[0-9a-f]+\.img`), (*judge).ghost},
		{named(`tty-info\.img`), (*judge).ttys},
		{named(`netns-\d+\.img`), (*judge).netns},
		{named(`netdev-\d+\.img`), (*judge).netdev},
		{named(`(ifaddr|route6?|rule)-\d+\.img`), (*judge).routes},
		{named(`netns-(ct|exp)-\d+\.img`), (*judge).tracked},
		{named(`ip6?tables-\d+\.img`), (*judge).iptables},
		{named(`nftables-\d+\.img`), (*judge).nftables},
		{named(`tmpfs-(dev-)?\d+\.tar\.gz\.img`), (*judge).tmpfs},
		{named(`(autofs-\d+|binfmt-misc(-\d+)?|bpfmap-(file|data))\.img`), (*judge).rooted},
		{named(`utsns-\d+\.img`), (*judge).utsns},

		{named(`mm-\d+\.img`), (*judge).mm},
		{named(`pidns-\d+\.img`), (*judge).pidns},
		{named(`fdinfo-\d+\.img`), form(magicFdinfo, maxEntries)},
		{named(`fs-\d+\.img`), form(magicFS, 1)},
		{named(`timens-\d+\.img`), form(magicTimens, 1)},
		{named(`ipcns-var-\d+\.img`), form(magicIPCVar, 1)},
		{named(`remap-fpath\.img`), form(magicRemap, maxEntries)},
		{named(`filelocks\.img`), form(magicLocks, maxEntries)},
		{named(`memfd\.img`), form(magicMemfd, maxEntries)},

		{named(`(pagemap|pages|pagemap-shmem|pages-shmem|ipcns-(shm|msg|sem))-\d+\.img`), nil},
		{named(`tcp-stream-[0-9a-f]+\.img`), nil},
		{named(`(pipes-data|fifo-data|sk-queues|tty-data|timerfd|cpuinfo|stats-dump|stats-restore)\.img|stats-(dump|restore)`), nil},
		{named(`descriptors\.json|agentbox-proof\.json|(dump|restore)\.log|criu\.work`), nil},
	}
})

func named(pattern string) *regexp.Regexp { return regexp.MustCompile(`^(` + pattern + `)$`) }

// judge is a Judge under way.
type judge struct {
	dir  string
	spec *Spec
	own  string // the container's cgroup, if it is known

	outside *message // ids of CRIU's own namespaces
	first   string   // the image of the ids of the first process
	filters []filter
	filterR []filterRef
	leaders map[string]string // images of threads: that of their process
	sets    map[uint32]bool   // of cgroups, that processes are in
	mounts  map[string][]mount
	tars    map[string]*contents
}

// Judge reads the images of a dump and refuses what a container of the spec cannot have had,
// before CRIU reads them; cgroups, which the OCI runtime makes, it writes anew. cgroup is the
// container's, below where cgroups are mounted; empty: the runtime tells CRIU which it is. A
// refusal is a *Refusal, images that make no sense are ErrCorrupt.
func Judge(dir string, spec *Spec, cgroup string) error {
	j := &judge{
		dir: dir, spec: spec, own: cgroup, sets: map[uint32]bool{}, leaders: map[string]string{},
		mounts: map[string][]mount{}, tars: map[string]*contents{},
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("images: %w", err)
	}
	if len(entries) > maxImages {
		return fmt.Errorf("images: %d files are past all bounds: %w", len(entries), fault.ErrCorrupt)
	}
	seen := map[string]bool{}
	for _, e := range entries {
		seen[e.Name()] = true
		if err := j.file(e); err != nil {
			return err
		}
	}
	if !seen["inventory.img"] {
		return fmt.Errorf("image inventory.img is missing: %w", fault.ErrCorrupt)
	}
	for _, step := range []func() error{j.checkNamespaces, j.checkFilters, j.checkMounts, j.checkCgroup} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

func (j *judge) file(e fs.DirEntry) error {
	name := e.Name()
	for _, k := range kinds() {
		if !k.name.MatchString(name) {
			continue
		}
		if !e.Type().IsRegular() {
			return refuse(name, "file", "it is no regular file")
		}
		if k.judge == nil {
			return nil
		}
		return k.judge(j, name)
	}
	return refuse(quoted(name), "name", "no dump of a container has such a file")
}

func quoted(s string) string {
	if len(s) > 80 {
		s = s[:80]
	}
	return fmt.Sprintf("%q", s)
}

func (j *judge) open(name string) (*os.File, error) {
	return os.OpenFile(filepath.Join(j.dir, name), os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
}

// read returns the bytes of an image.
func (j *judge) read(name string) ([]byte, error) {
	f, err := j.open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("image %s is missing: %w", name, fault.ErrCorrupt)
	}
	if err != nil {
		return nil, fmt.Errorf("image %s: %w", name, err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxImage+1))
	if err != nil {
		return nil, fmt.Errorf("image %s: %w", name, err)
	}
	if len(data) > maxImage {
		return nil, fmt.Errorf("image %s: more than %d bytes: %w", name, maxImage, fault.ErrCorrupt)
	}
	return data, nil
}

// each calls fn with each entry of an image, at most so many.
func (j *judge) each(name string, magic uint32, most int, fn func([]byte) error) error {
	data, err := j.read(name)
	if err != nil {
		return err
	}
	return eachEntry(name, data, magic, most, fn)
}

func eachEntry(name string, data []byte, magic uint32, most int, fn func([]byte) error) error {
	damaged := func(why string) error { return fmt.Errorf("image %s %s: %w", name, why, fault.ErrCorrupt) }
	rest, ok := bytes.CutPrefix(data, head(magic))
	if !ok {
		return damaged("does not begin as one of its kind")
	}
	for n := 0; len(rest) > 0; n++ {
		if len(rest) < 4 {
			return damaged("is cut off")
		}
		size := binary.LittleEndian.Uint32(rest)
		if rest = rest[4:]; int64(size) > int64(len(rest)) {
			return damaged("is cut off")
		}
		if size > maxEntry || n == most {
			return damaged("has more than any dump")
		}
		if err := fn(rest[:size:size]); err != nil {
			return err
		}
		rest = rest[size:]
	}
	return nil
}

func head(magic uint32) (b []byte) {
	if magic != magicInventory {
		b = binary.LittleEndian.AppendUint32(b, magicCommon)
	}
	return binary.LittleEndian.AppendUint32(b, magic)
}

// one is each of an image that has one entry.
func (j *judge) one(name string, magic uint32, what string) (m *message, err error) {
	err = j.each(name, magic, 1, func(data []byte) (err error) {
		m, err = decode(name, what, data)
		return err
	})
	if err == nil && m == nil {
		err = fmt.Errorf("image %s is empty: %w", name, fault.ErrCorrupt)
	}
	return m, err
}

// form judges an image of which all that it has stays in the container: that it is written as
// an encoder writes it, so that CRIU reads no other thing there than any other reader.
func form(magic uint32, most int) func(*judge, string) error {
	return func(j *judge, name string) error {
		return j.each(name, magic, most, func(data []byte) error {
			_, err := decode(name, "entry", data)
			return err
		})
	}
}

// rooted are images that only the host's root has a use for.
func (j *judge) rooted(name string) error {
	if j.spec.hostRoot() {
		return nil
	}
	return refuse(name, "name", "its processes cannot have made what it restores")
}
