package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/internal/hostfile"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// putHosts puts the attached files back once the sandbox is restored. If one cannot be
// put, it changes back those that were, and sets r.err, with which the restore fails in
// the end: the sandbox stays restored.
func (r *attachedPart) putHosts(ctx context.Context) {
	cause := r.putAll(ctx)
	if cause == nil {
		r.told = append(r.told, r.lateHosts(r.hostReport())...)
		return
	}
	err := fmt.Errorf("the sandbox is restored, but its host files are as they were: %w", calledOff{cause})
	if left := r.returnHosts(ctx); len(left) > 0 {
		text := fmt.Sprintf("not put back to what they were: %s; %s", strings.Join(left, "; "), r.keepHostUndo(ctx))
		err = fmt.Errorf("the sandbox is restored, but its host files are not: %w; %s", calledOff{cause}, text)
	}
	text := fmt.Sprintf("Mend that, and restore again with: agentbox restore --attached %s %s",
		r.sb.Name, short(r.row.ID))
	if !r.data.NoUndo && r.data.Undo != "" {
		text += ", or take the sandbox back with: agentbox restore --undo " + r.sb.Name
	}
	r.err = hint(err, text)
	r.noteHosts(err.Error()) // the caller may have disconnected
}

// noteHosts records as an event that host files are not what the checkpoint has.
func (r *attachedPart) noteHosts(why string) {
	if err := r.e.events.note(r.sb.ID, runtime.Event{
		Time: time.Now(), Type: runtime.EventHostFiles, Checkpoint: r.row.ID, Reason: why,
	}); err != nil {
		r.e.log.Warn("event not recorded", "sandbox", r.sb.ID, "err", err)
	}
}

// putAll puts one file after the other, once all of them have been checked.
func (r *attachedPart) putAll(ctx context.Context) error {
	if r.hosts.err != nil {
		return r.hosts.err
	}
	for _, f := range r.hosts.list {
		if err := r.lookAgain(ctx, f); err != nil {
			return f.says(err)
		}
	}
	if err := failpoint.Hit("restore.attached.before-put"); err != nil {
		return err
	}
	for i, f := range r.hosts.list {
		if i > 0 {
			if err := failpoint.Hit("restore.attached.between"); err != nil {
				return err
			}
		}
		was := &f.was
		if r.hosts.undo == nil || f.commanded {
			was = nil
		}
		action, err := f.at.Put(ctx, f.name, r.tempOf(f), f.want, was, func() error {
			return failpoint.Hit("restore.attached.before-replace")
		})
		if action != "" {
			f.action = action
		}
		f.put = action == runtime.AttachedPut || action == runtime.AttachedRemoved // or the outcome is unknown
		if err != nil {
			return f.says(err)
		}
		if f.commanded {
			r.told = append(r.told, fmt.Sprintf("host file %s was changed by an undo command; that content is not kept",
				f.path))
		}
	}
	return failpoint.Hit("restore.attached.after-put")
}

// lookAgain refuses a file that differs from the undo checkpoint, unless the restore's own
// undo commands may have changed it: their work is undone with it.
func (r *attachedPart) lookAgain(ctx context.Context, f *hostFile) error {
	if f.err != nil || r.hosts.undo == nil {
		return f.err
	}
	for _, s := range []hostfile.State{f.want, f.was} {
		if is, err := f.at.Has(ctx, f.name, s); err != nil || is {
			return err
		}
	}
	if !r.effects.commanded && len(r.effects.compensated) == 0 {
		return hostfile.ErrChanged
	}
	f.commanded = true
	return nil
}

// returnHosts changes the files that putAll has put back to what they were, and says which
// it could not. It updates the action of each file.
func (r *attachedPart) returnHosts(ctx context.Context) (left []string) {
	for _, f := range r.hosts.list {
		if !f.put {
			if f.action != runtime.AttachedSame {
				f.action = runtime.AttachedLeft // its planned action was not done
			}
			continue
		}
		err := errors.New("no checkpoint has what it was")
		if r.hosts.undo != nil {
			_, err = f.at.Put(ctx, f.name, r.tempOf(f), f.was, &f.want, func() error {
				return failpoint.Hit("restore.attached.before-return")
			})
		}
		if err != nil {
			left = append(left, fmt.Sprintf("%s (%v)", f.path, err))
			continue
		}
		f.action = runtime.AttachedReturned
	}
	return left
}

// keepHostUndo keeps the checkpoint with the previous files, and names it.
func (r *attachedPart) keepHostUndo(ctx context.Context) string {
	id := r.hostUndo()
	if id == "" {
		return "no checkpoint has what they were"
	}
	if err := r.e.store.Pin(ctx, id, true); err != nil {
		return fmt.Sprintf("checkpoint %s was to have what they were (%v)", short(id), err)
	}
	r.stranded = true
	if r.hosts.unread {
		return fmt.Sprintf("undo checkpoint %[1]s should have what they were, but cannot be read; it is pinned until 'agentbox checkpoint unpin %[1]s'", short(id))
	}
	flag := ""
	if r.data.HostUndo != "" {
		flag = "--attached "
	}
	return fmt.Sprintf("undo checkpoint %[1]s has what they were, and is pinned: bring back all that it has with 'agentbox restore %[2]s%[3]s %[1]s', or give it up with 'agentbox checkpoint unpin %[1]s'", short(id), flag, r.sb.Name)
}

// resumeHosts puts the attached files of a restore whose sandbox is restored and that was
// killed before it had put all of them. It never changes files back. A file that has neither
// its previous nor its planned content was changed by another process since: resumeHosts
// leaves it and names it, as it does files whose state cannot be determined any more.
func (r *attachedPart) resumeHosts(ctx context.Context) (told string) {
	h, cause := &hostFiles{}, error(nil)
	if !r.data.thisBoot() {
		cause = fmt.Errorf("the host was restarted since: %w", runtime.ErrState)
	} else if r.reader == nil || r.row.Attached == nil {
		cause = fmt.Errorf("checkpoint %s cannot be read", short(r.row.ID))
	} else if h, cause = r.openAnswering(ctx); cause == nil {
		r.hosts = h
		if err := r.recallHosts(ctx); err != nil {
			r.e.log.Warn("state of host files not recorded", "sandbox", r.sb.ID, "checkpoint", r.hostUndo(), "err", err)
			h.forgetUndo()
			h.unread = true
		}
	}
	r.hosts = h
	var stuck []<-chan error
	defer func() {
		if len(stuck) == 0 {
			r.closeHosts()
			return
		}
		r.hosts = nil
		guard.Go(func() { // calls that are still blocked use the directories
			for _, done := range stuck {
				<-done
			}
			_ = h.close() // they were only read
		})
	}()
	var left []string
	if cause = cmp.Or(cause, failpoint.Hit("restore.attached.before-put")); cause != nil {
		left, h.list = append(left, fmt.Sprintf("%s (%v)", strings.Join(r.data.HostFiles, ", "), cause)), nil
	}

	for i, f := range h.list {
		var err error
		if i > 0 {
			err = failpoint.Hit("restore.attached.between")
		}
		if err == nil {
			var done <-chan error
			if done, err = answering(ctx, hostAnswer, func(ctx context.Context) error {
				return r.resumeHost(ctx, h, f)
			}); done != nil {
				stuck = append(stuck, done)
			}
		}
		if err != nil {
			left = append(left, fmt.Sprintf("%s (%v)", f.path, err))
		}
	}
	if len(left) == 0 {
		return ""
	}
	told = fmt.Sprintf("host files that are left as they are: %[1]s; %[2]s; make them what checkpoint %[4]s has with 'agentbox restore --attached %[3]s %[4]s'",
		strings.Join(left, "; "), r.keepHostUndo(ctx), r.sb.Name, short(r.row.ID))
	if len(r.sb.Spec) > 0 { // the sandbox exists; any command, or the service, may be the one that reports this
		r.noteHosts(told)
	}
	return "; " + told
}

// hostAnswer is how long recovery, with which every command begins, waits for the
// filesystem of one host file; a test makes it shorter.
var hostAnswer = 20 * time.Second

// answering runs do, which may block on an unresponsive filesystem. After wait it returns
// with done, on which do's result will arrive. The context of do ends then, so that do
// replaces nothing any more.
func answering(ctx context.Context, wait time.Duration, do func(context.Context) error) (done <-chan error, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, wait, fmt.Errorf("%w: its filesystem has not answered for %v",
		runtime.ErrBusy, wait))
	defer cancel()
	ends := guard.Start(func() error { return do(ctx) })
	select {
	case err := <-ends:
		return nil, err
	case <-ctx.Done():
	}
	select { // do checks its context between two blocks
	case err := <-ends:
		return nil, err
	case <-time.After(time.Second):
		return ends, context.Cause(ctx)
	}
}

// openAnswering is openHosts for recovery.
func (r *attachedPart) openAnswering(ctx context.Context) (*hostFiles, error) {
	h := &hostFiles{}
	done, err := answering(ctx, recoverWait+hostAnswer, func(ctx context.Context) error {
		opened, err := r.openHosts(ctx, recoverWait)
		if opened != nil {
			h = opened
		}
		return err
	})
	if done == nil {
		return h, err
	}
	guard.Go(func() {
		<-done
		_ = h.close() // they were only read
	})
	return &hostFiles{}, err
}

// resumeHost puts one host file. It may go on, blocked, when the restore is over: it uses h, not
// r.hosts.
func (r *attachedPart) resumeHost(ctx context.Context, h *hostFiles, f *hostFile) error {
	if f.err != nil {
		return f.err
	}
	temp := r.tempOf(f)
	if err := f.at.Clear(temp); err != nil {
		r.e.log.Warn("host file not cleaned up", "path", f.path, "err", err)
	}
	if h.undo != nil {
		_, err := f.at.Put(ctx, f.name, temp, f.want, &f.was, func() error {
			// recovery may have stopped waiting
			return cmp.Or(failpoint.Hit("restore.attached.before-replace"), context.Cause(ctx))
		})
		return err
	}
	is, err := f.at.Has(ctx, f.name, f.want)
	if err == nil && !is {
		err = errors.New("it is not what the checkpoint has, and what it was before the restore is not known")
	}
	return err
}

// finishHosts resumes a restore whose sandbox is already restored and may be running. No
// failure here keeps the intent: host files are their owner's.
func (rec *recovery) finishHosts(
	ctx context.Context, in store.Intent, host Host, lock *store.Lock, data restoring,
) (did string, err error) {
	did = fmt.Sprintf("finished the restore of sandbox %s to checkpoint %s", short(in.Sandbox), short(in.Checkpoint))
	sb, err := rec.store.Sandbox(ctx, in.Sandbox)
	if errors.Is(err, runtime.ErrNotFound) {
		sb = store.Sandbox{ID: in.Sandbox, Name: short(in.Sandbox)}
	} else if err != nil {
		return "", err
	}
	c, err := host.Inspect(ctx, in.Sandbox)
	if err != nil { // the next restore discards what this one has staged
		c = runtime.Container{}
	}
	data.Trees, _ = data.own(c)
	r := rec.restores.newRestoration(&locked{Sandbox: sb, host: host, lock: lock}, data)
	r.resumed, r.seq, r.c = true, in.Seq, c
	if r.row, err = rec.store.Checkpoint(ctx, in.Checkpoint); err == nil {
		r.reader, err = rec.store.OpenCheckpoint(ctx, in.Checkpoint)
	}
	if err != nil {
		rec.log.Warn("checkpoint of an interrupted restore not readable", "sandbox", in.Sandbox, "checkpoint",
			in.Checkpoint, "err", err)
		r.row.ID = in.Checkpoint
	} else {
		if r.spec, err = spec(sb); err != nil {
			rec.log.Warn("sandbox spec not readable", "sandbox", in.Sandbox, "err", err)
		}
		defer func() { _ = r.reader.Close() }() // it was only read
	}
	err = r.finish(ctx)
	if did += r.attached.report; err != nil {
		rec.log.Warn("staging of an interrupted restore not removed", "sandbox", in.Sandbox, "err", err)
		did += fmt.Sprintf("; what it has laid out, or its undo checkpoint, is left: %v", err)
	}
	return did, nil
}

// hostUndo returns the checkpoint that has the files from before the restore.
func (r *attachedPart) hostUndo() string { return cmp.Or(r.data.HostUndo, r.data.Undo) }
