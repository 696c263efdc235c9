// Package portable carries a checkpoint as one file, in the layout that Podman,
// CRI-O and checkpointctl read, with all that their formats cannot say beside it.
//
//	checkpoint --Export--> [tar --> zstd|gzip --> age] --Open--> Archive --Import--> Target
//
// An archive of ours is a tar of these members, in this order, all of them plain
// files of mode 0600 of uid 0, with the checkpoint's time:
//
//	agentbox/version          one line
//	agentbox/manifest.json    the store's manifest, byte for byte
//	agentbox/images.jsonl     the store's list of the process images, if the manifest does not name them
//	agentbox/tree-N.jsonl     the entries of the files (0) and of the volumes (1...)
//	config.dump, spec.dump    what Podman makes a container of
//	network.status            null
//	deleted.files             a JSON list of what the files delete of the image
//	rootfs-diff.tar           the files that have content, in the order of the tree
//	volumes/NAME.tar          the same of each volume
//	checkpoint/               the process images, sorted
//
// The same checkpoint always makes the same bytes, until they are encrypted. The
// content of a file travels once, in rootfs-diff.tar; everything else about it
// is believed from the tree, and what rootfs-diff.tar says must agree. It shows
// no whiteouts, opaque marks, sockets and attributes of other programs' concern
// (trusted.*), which the tree has. A directory that is opaque is shown as
// deletions of what it hides, when the caller can tell what that is; Podman's
// own way, the directory in deleted.files, has Podman delete the new content too.
//
// Import takes that, and archives of `podman container checkpoint --export`,
// from which it makes a tree: what is in deleted.files becomes a whiteout, or,
// when something lies below, an opaque directory. Their process images are
// changed so that they fit a sandbox of ours; see adaptImages.
//
// # What is not trusted
//
// All of an archive. Nothing is unpacked: a member's name is only ever compared
// with the names above, an entry's path ends up in a tree and never in a system
// call. What an import writes are unlinked files in its scratch directory, plain
// files in the draft's directory for process images, and chunks. Links, devices
// and holes among the members, unknown members of an archive of ours, members
// that come twice or out of place, entries out of order, without a parent, or
// different from the tree are ErrCorrupt. So is what decompresses to more than
// the bounds in OpenOptions.
//
// Process images are looked at for what a container of the usual kind cannot
// have: mounts of devices, a writable /proc/sys or /sys, further capabilities.
// That is no proof. CRIU restores as root what images say, so restoring the
// processes of an archive means trusting its maker; its files alone need no
// trust.
//
// # What Podman makes of ours
//
// `podman container restore --import` wants an image of the name in config.dump,
// with the same content. It then continues the processes, with their files,
// their /dev/shm and their log; a sandbox without a network gets a namespace that
// has only lo. Podman mounts its own /etc/hosts, hostname and resolv.conf. Binds
// work when their sources are there. Not possible: sandboxes with --init, whose
// init is a file of agentbox's; of other backends than oci, whose mounts are
// others; connections of a bridged sandbox, whose address changes. What
// Podman starts in it later (podman exec) has no system call filter. Holes are
// filled; sockets, and deleted names that are not UTF-8, are lost there.
//
// # What Podman's archives lack
//
// Podman 4.3 leaves out a modified file of the image, unless its host happens to
// have a file of that name; it tells an empty directory that was made anew from
// a deleted one no more than it does times of directories above a change.
package portable

import (
	"context"
	"encoding/json"
	"io"
	"time"

	"github.com/agentbox/agentbox/overlay"
)

// Data is the source that Export reads a checkpoint from; *store.Reader is one.
type Data interface {
	// Tree opens the JSON lines of the n-th tree: 0 the files, 1+i the i-th volume.
	Tree(ctx context.Context, n int) (io.ReadCloser, error)
	// Source has the data of the files of all trees.
	Source() overlay.Source
	// ImageList opens the JSON lines of the process images, which are asked for if the
	// manifest does not name them.
	ImageList(ctx context.Context) (io.ReadCloser, error)
	// Image opens a process image.
	Image(ctx context.Context, name string) (io.ReadCloser, error)
}

// Target is the destination that Import writes a checkpoint to; *store.Draft is one.
type Target interface {
	Sink() overlay.Sink
	PutTree(ctx context.Context, n int, each func(fn func(overlay.Entry) error) error) error
	// CRIUDir is an empty directory, for the process images.
	CRIUDir() string
	PutImages(ctx context.Context) error
}

// Checkpoint is the input of Export.
type Checkpoint struct {
	Manifest []byte // the store's, in canonical form
	Data     Data

	// Lower lists what the image has in a directory, nil when it does not exist or is no
	// directory. Podman learns by it what an opaque directory hides. May be nil.
	Lower func(path string) ([]LowerEntry, error)
	// ImageName and ImageID are what Podman calls the image. Empty: by the name
	// in the spec, "localhost/" before it when it names no registry, and by the digest
	// in the manifest, which is that of its configuration.
	ImageName, ImageID string
}

// LowerEntry is a name in a directory of the image.
type LowerEntry struct {
	Name string
	Dir  bool
}

// Compressions.
const (
	Zstd = "zstd"
	Gzip = "gzip"
	None = "none"
)

// Options modify Export.
type Options struct {
	Compress   string                  // Zstd (also when empty), Gzip or None
	Recipients []string                // age1... and ssh-... public keys; empty: not encrypted
	Progress   func(done, total int64) // bytes of file and image data
}

// OpenOptions modify Open.
type OpenOptions struct {
	Identities string // path of a file of age identities, or an SSH private key
	Scratch    string // a directory for temporary files, unlinked at once; empty: the system's
	MaxBytes   int64  // of the archive, decompressed; 0: 16 TiB
	MaxRatio   int64  // decompressed to compressed bytes, beyond the first 4 GiB; 0: 1000
	Progress   func(done, total int64)
}

// Facts are an archive's facts about its checkpoint.
type Facts struct {
	// Manifest is the store's manifest of an archive of ours. Nil: it is
	// another engine's, and all that follows is from its config.dump and spec.dump.
	Manifest json.RawMessage

	Engine    string // "podman", "cri-o" or "" when it does not say
	ID        string
	Name      string // of the container
	Image     string // its name, e.g. localhost/bb:latest
	ImageID   string // its configuration's digest, hex, as Podman has it; may be empty
	Created   time.Time
	Runtime   string   // e.g. runc
	Args      []string // the command, entrypoint included
	Env       []string
	Workdir   string
	User      string // uid:gid
	Hostname  string
	Terminal  bool
	OpenStdin bool
	ReadOnly  bool
	Labels    map[string]string
	Network   string // "none", "host" or "bridge"
	Ports     []Port
	Mounts    []Mount  // except those that every container has
	Volumes   []string // names, in the order of the trees
	Memory    int64    // bytes; 0: no limit
	Pids      int64
	CPUs      float64
	Signal    string // that stops it; a number

	// Capabilities are those that processes started later may have, of those that a sandbox can
	// be given; nil: not stated.
	Capabilities []string
}

// Port is a published port.
type Port struct {
	HostIP          string
	Host, Container uint16
	Protocol        string
}

// Mount is a mount that was requested.
type Mount struct {
	Type, Source, Target string
	ReadOnly             bool
	Options              []string
}

// ImportOptions modify Import.
type ImportOptions struct {
	// Lower describes a path of the image. It completes another engine's archive for
	// directories that are in it only because of what lies below them. A path that does not
	// exist is ErrNotFound. May be nil: such directories then belong to root and have mode
	// 0755.
	Lower func(path string) (overlay.Entry, error)
	// Trust takes process images that ask for more than a container of the
	// usual kind has; else they are ErrDenied.
	Trust bool
}

// Imported reports an Import.
type Imported struct {
	Trees     int
	Entries   int64 // of all trees
	Data      int64 // bytes of file data
	Images    int   // process images; 0: there are no processes
	ImageData int64
	Deleted   int      // paths of the image that are gone
	Notes     []string // what could not be carried over, a sentence each
}
