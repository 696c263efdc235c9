// Package layer turns the tar stream of an image's layer into a lower directory
// of overlayfs, and back.
//
// A layer is a directory:
//
//	diff/        the files: a lower directory, whiteouts and opaque marks in overlayfs' form
//	frame.zst    what the tar has beside the contents of its files
//	spare/N      contents that a later entry of the same tar replaced; seldom there
//
// Unpack fills it while it digests the stream. Pack makes the very same stream
// again, byte by byte, so that its digest proves the files; Verify does that and
// compares what the headers say with what is on disk. The frame costs the tar's
// headers, compressed.
//
// Streams are hostile: tree.Extract contains them, and all that grows with
// their size is bounded.
package layer

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"strings"

	"archive/tar"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/cptar/tree"
	"github.com/agentbox/agentbox/internal/fault"
)

const (
	diffName  = "diff"
	frameName = "frame.zst"
	spareName = "spare"
)

// Options modify Unpack. The zero value works.
type Options struct {
	MaxEntries int64 // default 10 million
	MaxBytes   int64 // of file contents, and of the stream; default: any
	MinFree    int64 // bytes of the file system that stay free
	Progress   func(entries, bytes int64)
}

// Report tells what a layer is.
type Report struct {
	DiffID  string // "sha256:..." of the stream
	Entries int64
	Bytes   int64 // of file contents
	// Implicit are the directories that the stream has no entry for, though
	// something lies in them; "" is the top. They show what the layer below has.
	Implicit []string
	Opaque   bool // it hides all layers below
}

// Unpack makes a layer in the empty directory dir from the plain tar stream r, which it reads to
// its end. The layer is not on disk yet when it returns. On error, anything may be in dir.
func Unpack(ctx context.Context, r io.Reader, dir *os.File, opts Options) (rep Report, err error) {
	diff, err := makeDiff(dir)
	if err != nil {
		return rep, err
	}
	defer diff.Close()
	fw, err := newFrameWriter(dir)
	if err != nil {
		return rep, err
	}
	fw.minFree = opts.MinFree
	defer func() { err = errors.Join(err, fw.close()) }()
	sum := sha256.New()
	in := ReadAhead(r, func(p []byte) { sum.Write(p) })
	defer in.Close()
	x := tree.ExtractOptions{
		Fresh: true, Owners: true, Privileged: true, Layer: true, Frame: fw,
		MaxEntries: opts.MaxEntries, MaxBytes: opts.MaxBytes, MinFree: opts.MinFree, Check: check,
		Xattr: func(name string) (bool, error) { return true, checkXattr(name) },
	}
	if opts.Progress != nil {
		x.Progress = func(r tree.Report) { opts.Progress(r.Entries, r.Bytes) }
	}
	got, err := tree.Extract(ctx, diff, in, x)
	if err != nil {
		return rep, err
	}
	if n := int64(len(got.Skipped)) + got.SkippedMore; n > 0 {
		return rep, fmt.Errorf("%w: %d entries cannot be unpacked exactly, the first is %s",
			fault.ErrUnsupported, n, got.Skipped[0])
	}
	return report(sum, got), nil
}

func report(sum hash.Hash, got tree.Report) Report {
	return Report{
		DiffID: "sha256:" + hex.EncodeToString(sum.Sum(nil)), Entries: got.Entries, Bytes: got.Bytes,
		Implicit: got.Implicit, Opaque: got.Opaque,
	}
}

func makeDiff(dir *os.File) (*os.File, error) {
	if err := unix.Mkdirat(int(dir.Fd()), diffName, 0o700); err != nil {
		return nil, err
	}
	diff, err := openDir(dir, diffName)
	if err != nil {
		return nil, err
	}
	if err := diff.Chmod(0o755); err != nil { // under every umask, unless the stream says otherwise
		diff.Close()
		return nil, err
	}
	return diff, nil
}

func openDir(dir *os.File, name string) (*os.File, error) {
	fd, err := unix.Openat(int(dir.Fd()), name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: dir.Name() + "/" + name, Err: err}
	}
	return os.NewFile(uintptr(fd), dir.Name()+"/"+name), nil
}

// overlayfs would obey its own marks instead of showing them.
func check(h *tar.Header) error {
	if h.Typeflag == tar.TypeChar && h.Devmajor == 0 && h.Devminor == 0 {
		return fmt.Errorf("%w: it is a device 0:0, which overlayfs takes for a deletion", fault.ErrInvalid)
	}
	return nil
}

func checkXattr(name string) error {
	if strings.HasPrefix(name, "trusted.overlay.") {
		return fmt.Errorf("%w: it has the attribute %s, which is overlayfs' own", fault.ErrInvalid, name)
	}
	return nil
}

// Seal makes a layer of the files that lie in dir's diff/ already, a plain tree.
// Equal trees give equal layers.
func Seal(ctx context.Context, dir *os.File) (rep Report, err error) {
	fw, err := newFrameWriter(dir)
	if err != nil {
		return rep, err
	}
	defer func() { err = errors.Join(err, fw.close()) }()
	sum := sha256.New()
	got, err := tree.Pack(ctx, dir, diffName, sum, tree.PackOptions{
		Name: ".", Sorted: true, Frame: fw, Xattr: func(name string) bool { return !tree.HostXattr(name) },
	})
	if err != nil {
		return rep, err
	}
	if n := int64(len(got.Skipped)) + got.SkippedMore; n > 0 {
		return rep, fmt.Errorf("%w: %d entries cannot be in an image, the first is %s",
			fault.ErrUnsupported, n, got.Skipped[0])
	}
	return report(sum, got), nil
}
