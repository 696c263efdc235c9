package engine

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/internal/hostfile"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// Attached files are files of the host that belong to a checkpoint, as one more tree. They
// are read before the sandbox is frozen; those that have changed by then are read again. A
// restore proves before anything ends that it can put them back, and puts them once the
// sandbox is restored (attachedput.go): a restore that fails or is rolled back touches none.
// Its undo checkpoint has their previous contents. A failure with a host file never keeps an
// intent in the journal.

// hostLook bounds how long a sandbox stays frozen for one changed host file.
const hostLook = 10 * time.Second

// hostWait is how long a restore waits for another one that puts files into the same directory.
const hostWait = 5 * time.Second

// attachable resolves the paths of the files to attach, and refuses those that cannot be.
func (cs *checkpoints) attachable(s runtime.Spec, paths []string) ([]string, error) {
	if len(paths) > store.MaxAttachedFiles {
		return nil, fmt.Errorf("%w: %d files to attach, at most %d", runtime.ErrInvalid, len(paths),
			store.MaxAttachedFiles)
	}
	var list []string
	for _, path := range paths {
		if !filepath.IsAbs(path) || !utf8.ValidString(path) || strings.ContainsRune(path, 0) {
			return nil, fmt.Errorf("%w: attach %q: give the absolute path of a file", runtime.ErrInvalid, path)
		}
		// "D/f/" and "D/link/../f" would be other files than the kernel finds there.
		if clean := filepath.Clean(path); clean != path || clean == "/" {
			return nil, fmt.Errorf("%w: attach %q: give the path of a file without a slash at its end, empty names, \".\" or \"..\"", runtime.ErrInvalid, path)
		}
		real, err := hostfile.Resolve(path)
		if err != nil {
			return nil, hint(fmt.Errorf("attach %s: %w: its directory: %w", path, runtime.ErrInvalid, err),
				"The file may be missing, its directory may not.")
		}
		if !utf8.ValidString(real) { // a manifest could not have it
			return nil, fmt.Errorf("%w: attach %s: it really is %q, which is not valid UTF-8",
				runtime.ErrInvalid, path, real)
		}
		if slices.Contains(list, real) {
			return nil, fmt.Errorf("%w: attach %s: it is given twice", runtime.ErrInvalid, path)
		}
		if err := cs.mayAttach(s, real); err != nil {
			return nil, err
		}
		list = append(list, real)
	}
	return list, nil
}

// mayAttach judges the real path of a host file as the source of a writable bind
// mount, under the policy that the sandbox was made under.
func (cs *checkpoints) mayAttach(s runtime.Spec, path string) error {
	for _, top := range []string{cs.store.Root(), cs.run, "/run/agentbox", "/proc", "/sys", "/dev"} {
		if real, err := filepath.EvalSymlinks(top); err == nil {
			top = real
		}
		if fsx.Within(top, path) {
			return fmt.Errorf("%w: %s is beneath %s, and cannot be attached", runtime.ErrInvalid, path, top)
		}
	}
	// Such a mount is of the file, not of its name: the sandbox would go on with the
	// replaced file, and its writes to that would be lost.
	if target, rest := mountedAt(s, path); target != "" && rest == "" {
		return hint(fmt.Errorf("%w: %s is mounted by itself at %s: the sandbox would not see what is put back",
			runtime.ErrState, path, target),
			"Mount the directory that it is in instead.")
	}
	p, err := recorded(s)
	if err != nil || p == nil {
		return err
	}
	return p.HostFile(path)
}

// mountedAt finds where a sandbox has a host file mounted: the target of the mount, empty
// for none, and the path below it, empty for a mount of the file itself.
func mountedAt(s runtime.Spec, path string) (target, rest string) {
	for _, m := range s.Mounts {
		if m.Type != "bind" {
			continue
		}
		source, err := filepath.EvalSymlinks(m.Source)
		if err != nil {
			source = filepath.Clean(m.Source)
		}
		if source == path {
			return m.Target, ""
		}
		if below, in := strings.CutPrefix(path, strings.TrimSuffix(source, "/")+"/"); in {
			target, rest = m.Target, below
		}
	}
	return target, rest
}

// lateHosts lists the files that a sandbox with resumed processes has mounted: what these
// have read before the files were put was not the checkpoint's content.
func (r *attachedPart) lateHosts(files []runtime.RestoredFile) (list []string) {
	if !r.starts() {
		return nil
	}
	for _, f := range files {
		if f.Action != runtime.AttachedPut && f.Action != runtime.AttachedRemoved {
			continue
		}
		if target, rest := mountedAt(r.spec, f.Path); target != "" {
			list = append(list, fmt.Sprintf("host file %s is put once the sandbox goes on, which has it at %s and can have read it before that", f.Path, filepath.Join(target, rest)))
		}
	}
	return list
}

// takeAttached reads the host files to attach into the draft: all of them while the sandbox
// still runs, and those that have changed since once more when it is frozen.
func (k *making) takeAttached(ctx context.Context, draft *store.Draft) error {
	frozen := k.taken != nil
	taken := make([]*hostfile.Taken, len(k.opts.Attach))
	copy(taken, k.taken)
	for i, path := range k.opts.Attach {
		var err error
		taken[i], err = takeHost(ctx, path, k.sb.steps.Sink(runtime.PhaseFiles, draft.Sink()), taken[i], frozen)
		if errors.Is(err, hostfile.ErrChanged) && !frozen {
			continue // perhaps by a process of the sandbox
		}
		if err != nil {
			return fmt.Errorf("host file %s: %w", path, calledOff{err})
		}
	}
	k.taken = taken
	return nil
}

// takeHost is hostfile.Take with a bound: Take blocks while its filesystem does not answer,
// and the filesystem may be served from within the sandbox. While that is frozen, each file
// has hostLook.
func takeHost(
	ctx context.Context, path string, to overlay.Sink, before *hostfile.Taken, frozen bool,
) (*hostfile.Taken, error) {
	if frozen {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, hostLook,
			fmt.Errorf("%w: it could not be read within %v while the sandbox stood still", runtime.ErrBusy, hostLook))
		defer cancel()
	}
	var t *hostfile.Taken
	done := guard.Start(func() (err error) {
		t, err = hostfile.Take(ctx, path, to, store.MaxAttached, before)
		return err
	})
	select {
	case err := <-done:
		return t, err
	case <-ctx.Done():
	}
	// Take checks its context between two blocks.
	select {
	case err := <-done:
		return t, err
	case <-time.After(time.Second):
		return nil, context.Cause(ctx)
	}
}

// fileAttached stores the list of the attached files. The entry of their directory has no
// owner and no times, so that unchanged files give the same list.
func (k *making) fileAttached(ctx context.Context, draft *store.Draft) error {
	if len(k.taken) == 0 {
		return nil
	}
	k.parts.Attached = &store.Attached{}
	list := []overlay.Entry{{Path: ".", Type: overlay.TypeDir, Mode: 0o700}}
	for i, t := range k.taken {
		f := store.AttachedFile{Path: k.opts.Attach[i], Absent: t.Entry == nil}
		if !f.Absent {
			f.Size = t.Entry.Size
			entry := *t.Entry
			entry.Path = strconv.Itoa(i)
			list = append(list, entry)
		}
		k.parts.Attached.Paths = append(k.parts.Attached.Paths, f)
	}
	slices.SortFunc(list, func(a, b overlay.Entry) int { return overlay.ComparePaths(a.Path, b.Path) })
	return draft.PutTree(ctx, 1+len(k.parts.Volumes), func(put func(overlay.Entry) error) error {
		for _, entry := range list {
			if err := put(entry); err != nil {
				return err
			}
		}
		return nil
	})
}

// attachedPart is the attached files of a restore.
type attachedPart struct {
	noWork
	*restoration
	all      bool       // they are put back even if the checkpoint is foreign
	none     bool       // they are left alone
	hosts    *hostFiles // those to put back; nil: none
	err      error      // why they are not put back, though the sandbox is restored
	report   string     // what recovery reports about them
	stranded bool       // some are not as they were; the checkpoint that has them is pinned
}

func (r *attachedPart) check(ctx context.Context) error {
	r.planHosts()
	return r.layHosts(ctx)
}

// prepare reads what the files are now. A sandbox that is recreated had them proven earlier,
// so a failure does not stop it now.
func (r *attachedPart) prepare(ctx context.Context) error {
	if r.resumed {
		return nil
	}
	err := r.recallHosts(ctx)
	if err != nil && r.data.Recreated {
		r.hosts.err, err = err, nil
	}
	return err
}

// settle puts the files.
func (r *attachedPart) settle(ctx context.Context) error {
	if len(r.data.HostFiles) == 0 {
		return nil
	}
	if r.data.Phase != phaseHosts {
		r.data.Phase = phaseHosts
		if err := r.note(ctx, false); err != nil {
			return err
		}
	}
	if r.resumed {
		r.report = r.resumeHosts(ctx)
	} else {
		r.sb.steps.Begin(runtime.PhaseHostFiles, 0)
		r.putHosts(ctx)
	}
	return nil
}

func (r *attachedPart) close() error {
	r.closeHosts()
	return nil
}

// last adds a later error to that of the files: with an intent left in the journal recovery
// would put them after all.
func (r *attachedPart) last(err error) error {
	if r.err != nil {
		r.err, err = errors.Join(r.err, err), nil
	}
	return err
}

// hostFile is an attached file that a restore puts back.
type hostFile struct {
	path, name string
	at         *hostfile.Dir
	err        error // why it cannot be put anywhere
	want, was  hostfile.State
	action     string
	put        bool // by this restore
	commanded  bool // an undo command may have changed it
}

func (f *hostFile) says(err error) error { return fmt.Errorf("host file %s: %w", f.path, err) }

// hostFiles are the attached files of one restore. Locks in the store protect their
// directories: any process that can read a directory could hold a lock on it forever. The
// locks do not exclude a restore under another root; Put detects that.
type hostFiles struct {
	list   []*hostFile
	err    error // why nothing is known about them
	dirs   []*hostfile.Dir
	locks  []*store.Lock
	locked []string      // ids of the locked directories
	undo   *store.Reader // has their previous contents; nil: no checkpoint has
	unread bool          // the checkpoint that has them cannot be read
}

// forgetUndo closes an undo checkpoint that cannot be read.
func (h *hostFiles) forgetUndo() {
	if h.undo != nil {
		_ = h.undo.Close() // it was only read
		h.undo = nil
	}
}

// closeHosts unlocks and closes the directories of the files.
func (r *attachedPart) closeHosts() {
	if err := r.hosts.close(); err != nil {
		r.e.log.Warn("directories of host files not closed", "sandbox", r.sb.ID, "err", err)
	}
}

func (h *hostFiles) close() error {
	if h == nil {
		return nil
	}
	var errs []error
	for _, d := range h.dirs {
		errs = append(errs, d.Close())
	}
	if h.undo != nil {
		errs = append(errs, h.undo.Close())
	}
	for _, l := range h.locks {
		l.Unlock()
	}
	h.dirs, h.locks, h.undo = nil, nil, nil
	return errors.Join(errs...)
}

// hostsLeft returns why a restore leaves the attached files alone; empty: it puts them back.
func (r *attachedPart) hostsLeft() string {
	a := r.row.Attached
	switch {
	case r.restart:
		return "a restart policy caused this restore"
	case r.none:
		return runtime.ByNoAttached
	case r.all:
		return ""
	case a != nil && (a.Foreign || r.row.Foreign):
		return "the checkpoint comes from elsewhere, and so do their paths; --attached puts them back all the same"
	case r.data.Recreated && r.data.HostUndo == "":
		return "the sandbox is made again, and no undo checkpoint would have what they are now; --attached puts them back all the same"
	}
	return ""
}

// hostPaths returns the paths that a restore puts back.
func (r *attachedPart) hostPaths() (list []string) {
	if r.row.Attached == nil || r.hostsLeft() != "" {
		return nil
	}
	for _, f := range r.row.Attached.Paths {
		list = append(list, f.Path)
	}
	return list
}

// plan adds what a restore would do with the files.
func (r *attachedPart) plan(ctx context.Context, out *runtime.RestorePlan) (err error) {
	if out.Attached, err = r.lookHosts(ctx, -1); err != nil {
		return err
	}
	if len(out.Attached) > 0 && r.hostsLeft() != "" {
		out.Effects = append(out.Effects, fmt.Sprintf("Not put back: %s.", r.hostsLeftText()))
	}
	for _, text := range r.lateHosts(out.Attached) {
		out.Effects = append(out.Effects, sentence(text))
	}
	return nil
}

// planHosts decides what the restore does with the attached files.
func (r *attachedPart) planHosts() {
	r.data.HostFiles = r.hostPaths()
	if r.row.Attached != nil && len(r.data.HostFiles) == 0 {
		r.warnings = append(slices.Clone(r.warnings), r.hostsLeftText())
	}
}

func (r *attachedPart) hostsLeftText() string {
	return fmt.Sprintf("host files of the checkpoint (%d) are left as they are: %s",
		len(r.row.Attached.Paths), r.hostsLeft())
}

// hostReport returns what the restore has done with the attached files.
func (r *attachedPart) hostReport() (list []runtime.RestoredFile) {
	if r.row.Attached == nil {
		return nil
	}
	for i, f := range r.row.Attached.Paths {
		list = append(list, runtime.RestoredFile{Path: f.Path, Action: runtime.AttachedLeft})
		if r.hosts != nil && i < len(r.hosts.list) {
			list[i].Action = r.hosts.list[i].action
		}
	}
	return list
}

// states returns the attached files of a checkpoint, by path.
func states(ctx context.Context, reader *store.Reader) (map[string]hostfile.State, error) {
	m := reader.Manifest()
	if m.Attached == nil {
		return nil, nil
	}
	list, err := reader.Tree(ctx, m.AttachedTree())
	if err != nil {
		return nil, err
	}
	files := map[string]*overlay.Entry{}
	err = overlay.ReadTree(list, func(e overlay.Entry) error {
		if files[e.Path] = &e; len(files) > store.MaxAttachedFiles+1 { // a foreign checkpoint may list anything
			return fmt.Errorf("host files of checkpoint %s: %w: too many", short(m.ID), runtime.ErrCorrupt)
		}
		return nil
	})
	if err := errors.Join(err, list.Close()); err != nil {
		return nil, err
	}
	out := map[string]hostfile.State{}
	for i, f := range m.Attached.Paths {
		entry := files[strconv.Itoa(i)]
		if f.Absent != (entry == nil) || entry != nil &&
			(entry.Type != overlay.TypeFile || entry.Hardlink != "" || entry.Size != f.Size) {
			return nil, fmt.Errorf("host file %s of checkpoint %s: %w: its tree is of other files", f.Path,
				short(m.ID), runtime.ErrCorrupt)
		}
		s := hostfile.State{Entry: entry}
		if entry != nil {
			s.Data = func(ctx context.Context) (io.ReadCloser, error) {
				if ctx.Err() != nil { // the reader may be closed by then
					return nil, context.Cause(ctx)
				}
				return reader.Source().Data(ctx, *entry)
			}
		}
		out[f.Path] = s
	}
	return out, nil
}

// openHosts opens the directories of the files that a restore puts back, and locks them; a
// negative wait does not lock. An error with a directory is stored in its files.
func (r *attachedPart) openHosts(ctx context.Context, wait time.Duration) (*hostFiles, error) {
	h := &hostFiles{}
	want, err := states(ctx, r.reader)
	if err != nil {
		return h, r.hostTrouble(err)
	}
	until := time.Now().Add(wait)
	byDir := map[string][]*hostFile{}
	for _, a := range r.row.Attached.Paths {
		dir, name := filepath.Split(a.Path)
		f := &hostFile{path: a.Path, name: name, want: want[a.Path]}
		if _, ok := want[a.Path]; !ok {
			return h, r.hostTrouble(fmt.Errorf("host file %s of checkpoint %s: %w: its manifest does not have it",
				a.Path, short(r.row.ID), runtime.ErrCorrupt))
		}
		h.list = append(h.list, f)
		byDir[filepath.Clean(dir)] = append(byDir[filepath.Clean(dir)], f)
	}
	var dirs []string
	for dir := range byDir {
		dirs = append(dirs, dir)
	}
	slices.Sort(dirs)
	for _, path := range dirs {
		d, err := hostfile.Open(path)
		if err == nil {
			h.dirs = append(h.dirs, d)
			if wait >= 0 {
				err = r.e.checkpoints.lockHosts(ctx, h, d, path, until)
			}
		}
		for _, f := range byDir[path] {
			f.at, f.err = d, err
		}
	}
	return h, nil
}

// lockHosts locks one directory, once even if it has two paths.
func (cs *checkpoints) lockHosts(
	ctx context.Context, h *hostFiles, d *hostfile.Dir, path string, until time.Time,
) error {
	id, err := d.ID()
	if err != nil || slices.Contains(h.locked, id) {
		return err
	}
	sum := sha256.Sum256([]byte("host directory " + id))
	lock, err := cs.store.Lock(ctx, hex.EncodeToString(sum[:16]), "restore", max(0, time.Until(until)))
	if errors.Is(err, runtime.ErrBusy) {
		return fmt.Errorf("%w: another restore puts files back in %s", runtime.ErrBusy, path)
	}
	if err == nil {
		h.locks, h.locked = append(h.locks, lock), append(h.locked, id)
	}
	return err
}

// tempOf is where a file is written first: an unpredictable name that recovery knows.
func (r *attachedPart) tempOf(f *hostFile) string {
	return "." + f.name[:min(len(f.name), 200)] + ".agentbox-" + short(cmp.Or(r.hostUndo(), r.row.ID))
}

// hostTrouble makes the error of a host file one that calls the restore off.
func (r *attachedPart) hostTrouble(err error) error {
	return hint(calledOff{err},
		fmt.Sprintf("Mend that and restore again, or leave host files alone with: agentbox restore --no-attached %s %s",
			r.sb.Name, short(r.row.ID)))
}

// checkHosts proves, as far as possible, that the files can be put back.
func (r *attachedPart) checkHosts(ctx context.Context, h *hostFiles) error {
	type room struct{ free, most, more int64 }
	rooms := map[uint64]*room{}
	limit := int64(store.MaxAttached)
	if r.data.Recreated && r.hostUndo() == "" {
		limit = math.MaxInt64 // nothing is to keep what they are now
	}
	for _, f := range h.list {
		err := f.err
		if err == nil {
			err = r.e.checkpoints.mayAttach(r.spec, f.path)
		}
		var grows int64
		if err == nil {
			f.action, grows, err = f.at.Check(ctx, f.name, f.want, limit)
		}
		if err == nil && f.action == runtime.AttachedPut {
			var dev uint64
			var free int64
			if dev, free, err = f.at.Free(); err == nil {
				if rooms[dev] == nil {
					rooms[dev] = &room{}
				}
				at := rooms[dev]
				at.free, at.most, at.more = free, max(at.most, f.want.Entry.Size), at.more+max(0, grows)
				if at.most+at.more > at.free {
					err = fmt.Errorf("%w: %d bytes are free there", unix.ENOSPC, free)
				}
			}
		}
		if err != nil {
			return r.hostTrouble(f.says(err))
		}
	}
	return nil
}

// layHosts opens and proves the files that a restore puts back, before anything ends. A
// sandbox that is recreated had them proven earlier, so a failure does not stop it now.
func (r *attachedPart) layHosts(ctx context.Context) (err error) {
	if len(r.data.HostFiles) == 0 {
		return nil
	}
	if r.hosts, err = r.openHosts(ctx, hostWait); err == nil {
		err = r.checkHosts(ctx, r.hosts)
	}
	if err != nil && r.data.Recreated {
		r.hosts.err, err = err, nil
	}
	return err
}

// lookHosts is layHosts for a restore that is only planned, or done later: it keeps nothing
// open or locked. A wait that is not negative has it try whether the locks can be had.
func (r *attachedPart) lookHosts(ctx context.Context, wait time.Duration) (list []runtime.RestoredFile, err error) {
	if len(r.hostPaths()) == 0 {
		return r.hostReport(), nil
	}
	if r.hosts, err = r.openHosts(ctx, wait); err == nil {
		err = r.checkHosts(ctx, r.hosts)
	}
	list = r.hostReport()
	err = errors.Join(err, r.hosts.close())
	r.hosts = nil
	return list, err
}

// proveHosts is lookHosts before a sandbox is recreated, and before it is removed for that.
// It returns the files to attach to the checkpoint of the sandbox's present state.
func (r *attachedPart) proveHosts(ctx context.Context) (paths []string, err error) {
	if paths = r.hostPaths(); len(paths) == 0 {
		return nil, nil
	}
	if r.reader, err = r.e.store.OpenCheckpoint(ctx, r.row.ID); err != nil {
		return nil, err
	}
	_, err = r.lookHosts(ctx, hostWait)
	return paths, errors.Join(err, r.reader.Close())
}

// recallHosts reads the contents of the files before the restore.
func (r *attachedPart) recallHosts(ctx context.Context) (err error) {
	id := r.hostUndo()
	if len(r.data.HostFiles) == 0 || id == "" {
		return nil
	}
	if r.hosts.undo, err = r.e.store.OpenCheckpoint(ctx, id); err != nil {
		return r.hostTrouble(err)
	}
	was, err := states(ctx, r.hosts.undo)
	if err != nil {
		return r.hostTrouble(err)
	}
	for _, f := range r.hosts.list {
		s, ok := was[f.path]
		if !ok {
			return r.hostTrouble(fmt.Errorf("%w: checkpoint %s does not have host file %s",
				runtime.ErrCorrupt, short(id), f.path))
		}
		f.was = s
	}
	return nil
}
