package main

import (
	"archive/tar"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/images/reference"
	"github.com/agentbox/agentbox/images/source"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
)

// shellImage is the image of a shell that none was chosen for: Debian with git and common tools.
const shellImage = "bootstrap:debian/bookworm?include=ca-certificates,curl,file,git,jq,less,make,nano," +
	"openssh-client,patch,procps,python3,python3-pip,python3-venv,ripgrep,tzdata,unzip,vim-tiny,wget,xz-utils,zip"

// The image of the host's own programs: imageHost is how a user names it, hostImage what it is in
// the store.
const (
	imageHost = "host"
	hostImage = "agentbox/host"
)

// announceImage says that an image is going to be made, which takes its time.
func announceImage(
	ctx context.Context, ref string, pull image.PullOptions, svc runtime.Service, stderr io.Writer,
) error {
	if ref != shellImage {
		return nil
	}
	r, err := reference.Parse(ref, "")
	if err == nil {
		r, err = source.Complete(r, pull.Source)
	}
	if err != nil {
		return err
	}
	_, err = svc.InspectImage(ctx, r.String())
	if !errors.Is(err, runtime.ErrNotFound) {
		return err
	}
	fmt.Fprintln(stderr, "Making the image for shells, by mmdebstrap: Debian bookworm with git, curl, python3 and\n"+
		"other tools. This takes a minute or more, once: the image is kept.")
	return nil
}

// hostMounts are the directories of the host's programs, where they are no links to others.
func hostMounts() (mounts []runtime.Mount, links []string, err error) {
	list, err := os.ReadDir("/")
	if err != nil {
		return nil, nil, err
	}
	for _, e := range list {
		name := e.Name()
		if !slices.Contains([]string{"usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "opt"}, name) {
			continue
		}
		switch e.Type() {
		case fs.ModeSymlink:
			links = append(links, name)
		case fs.ModeDir:
			mounts = append(mounts, runtime.Mount{Type: "bind", Source: "/" + name, Target: "/" + name, ReadOnly: true})
		}
	}
	return mounts, links, nil
}

// hostEtc is what the image of the host's programs has of the host's /etc: what programs need, and
// nothing that is secret. What does not exist is left out.
var hostEtc = []string{
	"alternatives", "bash.bashrc", "bashrc", "ca-certificates", "ca-certificates.conf", "debian_version", "fonts", "group",
	"inputrc", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types", "nsswitch.conf", "os-release",
	"passwd", "pki/ca-trust/extracted", "pki/tls/certs", "profile", "protocols", "services", "shells", "ssl/certs",
	"ssl/openssl.cnf", "terminfo", "timezone", "zsh",
}

// maxHostEtc bounds what is taken over of the host's /etc.
const maxHostEtc = 64 << 20

// importHostImage makes the image of the host's programs, or finds that it is as it was: equal
// files give an equal image.
func importHostImage(ctx context.Context, links []string, mounts []runtime.Mount, svc runtime.Service) error {
	r, w := io.Pipe()
	written := guard.Start(func() error {
		err := writeHostImage(w, links, mounts)
		w.CloseWithError(err)
		return err
	})
	_, err := svc.ImportImageFrom(ctx, hostImage, r)
	_ = r.Close() // it ends the writer
	if werr := <-written; werr != nil && !errors.Is(werr, io.ErrClosedPipe) {
		err = cmp.Or(werr, err)
	}
	if err != nil {
		return fmt.Errorf("the image of this host's programs: %w", err)
	}
	return nil
}

// writeHostImage writes the files of the image of the host's programs as a tar stream.
func writeHostImage(out io.Writer, links []string, mounts []runtime.Mount) error {
	w := &hostTree{tar.NewWriter(out), maxHostEtc}
	for _, name := range links {
		if err := w.entry("/"+name, name); err != nil {
			return err
		}
	}
	modes := map[string]int64{"tmp": 0o1777, "var": 0o755, "var/tmp": 0o1777, "root": 0o700}
	dirs := []string{"dev", "etc", "home", "media", "mnt", "proc", "root", "run", "srv", "sys", "tmp", "var", "var/tmp"}
	for _, m := range mounts {
		dirs = append(dirs, m.Target[1:])
	}
	for _, dir := range dirs {
		if err := w.dir(dir, cmp.Or(modes[dir], 0o755)); err != nil {
			return err
		}
	}
	made := map[string]bool{}
	for _, name := range hostEtc {
		for i, c := range name {
			if parent := name[:i]; c == '/' && !made[parent] {
				made[parent] = true
				if err := w.dir("etc/"+parent, 0o755); err != nil {
					return err
				}
			}
		}
		if err := w.tree("/etc/"+name, "etc/"+name); err != nil {
			return err
		}
	}
	return w.Close()
}

// A hostTree is the tar stream of the image of the host's programs. All in it is root's.
type hostTree struct {
	*tar.Writer
	left int64
}

func (w *hostTree) dir(name string, mode int64) error {
	return w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: mode, ModTime: time.Unix(0, 0)})
}

// tree writes a path of the host and what is below it, as far as each user of the host may read it.
func (w *hostTree) tree(from, to string) error {
	err := filepath.WalkDir(from, func(p string, e fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		if info, err := e.Info(); err != nil {
			return err
		} else if e.IsDir() && info.Mode()&0o005 != 0o005 {
			return fs.SkipDir
		}
		return w.entry(p, to+strings.TrimPrefix(p, from))
	})
	if err != nil {
		return fmt.Errorf("%s: %w", from, err)
	}
	return nil
}

// entry writes one path of the host that each user may read.
func (w *hostTree) entry(from, to string) error {
	info, err := os.Lstat(from)
	if err != nil {
		return err
	}
	h := &tar.Header{
		Typeflag: tar.TypeReg, Name: to, Mode: int64(info.Mode().Perm()), Size: info.Size(), ModTime: info.ModTime(),
		Format: tar.FormatPAX,
	}
	switch mode := info.Mode(); {
	case mode.IsDir():
		return w.dir(to, 0o755)
	case mode.Type() == fs.ModeSymlink:
		h.Typeflag, h.Size = tar.TypeSymlink, 0
		if h.Linkname, err = os.Readlink(from); err != nil {
			return err
		}
		return w.WriteHeader(h)
	case !mode.IsRegular() || mode&0o004 == 0:
		return nil
	}
	f, err := os.OpenFile(from, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if w.left -= h.Size; w.left < 0 {
		return fmt.Errorf("%w: more than %d bytes", runtime.ErrInvalid, int64(maxHostEtc))
	}
	if err := w.WriteHeader(h); err != nil {
		return err
	}
	_, err = io.CopyN(w, f, h.Size)
	return err
}
