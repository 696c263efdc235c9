package source

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/platforms"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/images/reference"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/lazy"
)

// Complete adds to a Bootstrap reference what else its files depend on (the
// architecture, SOURCE_DATE_EPOCH), so that its String may name what was made of
// it. Other references it returns as they are.
func Complete(ref reference.Reference, opts image.SourceOptions) (reference.Reference, error) {
	if ref.Transport != reference.Bootstrap {
		return ref, nil
	}
	q := maps.Clone(ref.Query)
	if q == nil {
		q = url.Values{}
	}
	if !q.Has("arch") {
		p, err := wanted(opts.Platform)
		if err != nil {
			return ref, err
		}
		arch, ok := debianArch[platforms.Format(p.spec)]
		if p.spec.OS != "linux" || !ok {
			return ref, fmt.Errorf("%w: Debian has no architecture for %s", fault.ErrUnsupported,
				platforms.Format(p.spec))
		}
		q.Set("arch", arch)
	}
	if !q.Has("variant") {
		q.Set("variant", "minbase")
	}
	if e := os.Getenv("SOURCE_DATE_EPOCH"); e != "" && !q.Has("epoch") {
		if !reference.Epoch().MatchString(e) {
			return ref, fmt.Errorf("SOURCE_DATE_EPOCH=%.20q: %w: it is no number of seconds", e, fault.ErrInvalid)
		}
		q.Set("epoch", e)
	}
	ref.Query = q
	return ref, nil
}

var debianArch = map[string]string{
	"linux/amd64": "amd64", "linux/386": "i386", "linux/arm64": "arm64", "linux/arm/v7": "armhf",
	"linux/arm/v6": "armel", "linux/arm/v5": "armel",
	"linux/ppc64le": "ppc64el", "linux/riscv64": "riscv64", "linux/s390x": "s390x", "linux/mips64le": "mips64el",
}

// Tree gives the files of a Bootstrap reference as a plain tar stream, as
// mmdebstrap makes them: the same packages and the same SOURCE_DATE_EPOCH
// always give the same bytes. They come from the mirrors of the reference, or
// from where this machine gets the suite, or from where mmdebstrap would. At EOF
// it is proven that all went well. The stream must be closed.
func Tree(ctx context.Context, ref reference.Reference, opts image.SourceOptions) (_ io.ReadCloser, err error) {
	defer func() {
		if err != nil {
			err = &fault.Error{Op: "bootstrap", ID: ref.Familiar(), Err: err}
		}
	}()
	if ref.Transport != reference.Bootstrap {
		return nil, fmt.Errorf("%w: it is no bootstrap", fault.ErrInvalid)
	}
	bin, err := exec.LookPath("mmdebstrap")
	if err != nil {
		return nil, &fault.Error{
			Hint: "Install it: apt-get install mmdebstrap.", Err: fmt.Errorf("%w: %w", fault.ErrUnsupported, err),
		}
	}
	if ref, err = Complete(ref, opts); err != nil {
		return nil, err
	}
	ctx, cancel := bounded(ctx, opts.Timeout)
	distro, suite, _ := strings.Cut(ref.Name, "/")
	mirrors := ref.Query["mirror"]
	if len(mirrors) == 0 {
		mirrors = hostMirrors(ctx, distro, suite, ref.Query.Get("components"))
	}
	if len(mirrors) == 0 && distro != "debian" {
		cancel()
		return nil, &fault.Error{
			Hint: "Add ?mirror=URL to the reference.", Err: fmt.Errorf("%w: apt here knows no mirror of %s",
				fault.ErrNotFound, ref.Name),
		}
	}
	args := []string{
		"--format=tar", "--variant=" + ref.Query.Get("variant"), "--architectures=" + ref.Query.Get("arch"),
	}
	for _, key := range []string{"include", "components"} {
		if v := ref.Query.Get(key); v != "" {
			args = append(args, "--"+key+"="+v)
		}
	}
	hook := "--customize-hook="
	if ref.Query.Get("variant") == "extract" { // which ends before that
		hook = "--extract-hook="
	}
	args = append(args, hook+notOurs, suite, "-")
	for _, m := range mirrors {
		args = append(args, local().ReplaceAllString(m, "${1}copy:"))
	}
	cmd := exec.CommandContext(ctx, bin, args...)
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	if e := ref.Query.Get("epoch"); e != "" {
		cmd.Env = append(cmd.Env, "SOURCE_DATE_EPOCH="+e)
	}
	// It has to unmount and to clean up; and it waits for its children, which
	// have to be told as a terminal would do it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if os.Geteuid() == 0 {
		// It mounts /proc and /sys in what it makes: killed, it would leave them on the
		// host. Without root it makes a namespace of its own.
		cmd.SysProcAttr.Unshareflags = unix.CLONE_NEWNS
	}
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGTERM) }
	cmd.WaitDelay = time.Minute
	// Its messages go to a file without a name: those into a pipe whose reader was killed
	// would end it at once, with what it has put into TMPDIR left there.
	messages, err := nameless()
	if err != nil {
		cancel()
		return nil, err
	}
	cmd.Stderr = messages
	c, err := start(ctx, cmd)
	if err != nil {
		cancel()
		return nil, errors.Join(err, messages.Close())
	}
	c.messages = messages
	limit := opts.MaxBytes
	if limit == 0 {
		limit = maxImage
	}
	return &debootstrap{command: c, cancel: cancel, ref: ref, left: limit}, nil
}

// maxMessages bounds what is read of a program's messages, from their end.
const maxMessages = 64 << 10

// nameless makes a file in memory, which goes with its last descriptor.
func nameless() (*os.File, error) {
	fd, err := unix.MemfdCreate("messages", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "messages"), nil
}

// notOurs empties what mmdebstrap copies from the machine that it runs on.
const notOurs = `for f in hostname resolv.conf; do rm -f "$1/etc/$f"; : >"$1/etc/$f"; chmod 644 "$1/etc/$f"; done`

// local finds the scheme of mirrors in files, which apt in its chroot cannot see
// unless they are copied there.
var local = lazy.Regexp(`(^|^deb (?:\[[^]]*\] )?)file:`)

// hostMirrors are the apt sources of this machine that have the suite.
func hostMirrors(ctx context.Context, distro, suite, components string) (list []string) {
	origin := strings.ToUpper(distro[:1]) + distro[1:]
	// The placeholders are apt's.
	out, err := exec.CommandContext(ctx, "apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)",
		"Created-By: Packages", "Origin: "+origin).Output()
	if err != nil {
		return nil // another system than Debian's
	}
	want := strings.Split(components, ",")
	if components == "" {
		want = []string{"main"}
	}
	has := false
	for line := range strings.Lines(string(out)) {
		f := strings.Fields(line)
		if len(f) != 3 || f[1] != suite && f[1] != suite+"-updates" && f[1] != suite+"-security" {
			continue
		}
		has = has || f[1] == suite
		if slices.Contains(want, f[2]) {
			list = append(list, "deb "+strings.Join(f, " "))
		}
	}
	if !has {
		return nil
	}
	return list
}

// debootstrap is the output of mmdebstrap.
type debootstrap struct {
	*command
	cancel context.CancelFunc
	ref    reference.Reference
	left   int64
	err    error
}

func (d *debootstrap) Read(p []byte) (int, error) {
	if d.err != nil {
		return 0, d.err
	}
	n, err := d.ReadCloser.Read(p)
	if d.left -= int64(n); d.left < 0 {
		err = fmt.Errorf("%w: the image has more bytes than are allowed", fault.ErrDenied)
	}
	if err == io.EOF {
		if e := d.command.Close(); e != nil {
			err = d.explain(e)
		}
	}
	d.err = err
	return n, err
}

func (d *debootstrap) explain(err error) error {
	hint := "mmdebstrap needs root, room in TMPDIR and the mirror; the last lines say what was amiss."
	switch said := d.stderr.String(); {
	case strings.Contains(said, "Unable to locate package"):
		hint = "Is the package in this suite, and in one of its components (?components=main,contrib)?"
	case strings.Contains(said, "does not have a Release file"):
		hint = "Is the suite spelt right, and does the mirror have it? Another one is named with ?mirror=URL."
	}
	return &fault.Error{Op: "bootstrap", ID: d.ref.Familiar(), Hint: hint, Err: err}
}

// Close ends mmdebstrap, should it still run, and waits until it has cleared up.
func (d *debootstrap) Close() error {
	early := d.err == nil || !errors.Is(d.err, io.EOF)
	d.cancel()
	err := d.command.Close()
	if early {
		return nil // Read has said why, or the caller wanted no more
	}
	return err
}
