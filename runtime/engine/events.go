package engine

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unicode"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/eventlog"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
	"github.com/agentbox/agentbox/runtime/store"
)

// followEvery is how often Events looks for new events while it follows.
const followEvery = 250 * time.Millisecond

// eventLog keeps the events of sandboxes, and how often each has hit its limits.
type eventLog struct {
	*core
}

func (evs *eventLog) dir() string { return filepath.Join(evs.store.Root(), "events") }

// Events calls each with the events of a sandbox.
func (v hostVerbs) Events(
	ctx context.Context, ref string, opts runtime.EventOptions, each func(runtime.Event) error,
) error {
	return v.e.verb(ctx, reads(onSandbox("events", ref)), func(ctx context.Context) error {
		return v.e.events.follow(ctx, ref, opts, each)
	})
}

func (evs *eventLog) follow(
	ctx context.Context, ref string, opts runtime.EventOptions, each func(runtime.Event) error,
) (err error) {
	sb, err := evs.locate(ctx, ref)
	if err != nil {
		return err
	}
	logs := []eventSource{{Reader: eventlog.NewReader(evs.dir(), sb.ID), sandbox: sb.ID}}
	if filter, ok := sb.host.Backend.(runtime.EgressFilter); ok {
		logs = append(logs, eventSource{eventlog.NewReader(filter.EgressLog(), sb.ID), sb.ID, runtime.EventDenied})
	}
	defer func() {
		for _, l := range logs {
			err = errors.Join(err, l.Close())
		}
	}()
	tick := time.NewTicker(followEvery)
	defer tick.Stop()
	var c runtime.Container
	for n := 0; ; n++ {
		// Asking an engine costs more than reading a counter.
		if n%4 == 0 || c.Pid == 0 || unix.Kill(c.Pid, 0) != nil {
			if c, err = sb.host.Inspect(ctx, sb.ID); err != nil && !errors.Is(err, runtime.ErrNotFound) {
				return err
			}
		}
		_, gone := evs.store.Sandbox(ctx, sb.ID)
		if gone == nil {
			if err := evs.noteHits(ctx, sb.Sandbox, c); err != nil {
				return err
			}
		}
		if err := readEvents(logs, opts, each); err != nil {
			return err
		}
		if errors.Is(gone, runtime.ErrNotFound) {
			gone = nil
			opts.Follow = false
		}
		if gone != nil || !opts.Follow {
			return gone
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// eventSource is a log of one sandbox's events.
type eventSource struct {
	*eventlog.Reader
	sandbox string
	only    string // the type of all its events. Their writer is confined, and may be compromised
}

func (s eventSource) event(line []byte) (runtime.Event, error) {
	var ev runtime.Event
	if err := json.Unmarshal(line, &ev); err != nil {
		return runtime.Event{}, err
	}
	if s.only != "" {
		ev = runtime.Event{
			Time: ev.Time, Type: s.only, Protocol: ev.Protocol, Name: ev.Name, Address: ev.Address,
			Reason: ev.Reason, Missed: ev.Missed,
		}
	}
	for _, text := range []*string{&ev.Protocol, &ev.Name, &ev.Address, &ev.Reason} {
		*text = strings.Map(func(r rune) rune {
			if !unicode.IsPrint(r) {
				return '?'
			}
			return r
		}, *text)
	}
	ev.Sandbox = s.sandbox
	return ev, nil
}

// readEvents calls each with the new events of the logs, by time.
func readEvents(logs []eventSource, opts runtime.EventOptions, each func(runtime.Event) error) error {
	var list []runtime.Event
	for _, l := range logs {
		err := l.Read(func(line []byte) error {
			ev, err := l.event(line)
			if err != nil {
				return nil // no event
			}
			if !ev.Time.Before(opts.Since) && (len(opts.Types) == 0 || slices.Contains(opts.Types, ev.Type)) {
				list = append(list, ev)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	slices.SortStableFunc(list, func(a, b runtime.Event) int { return a.Time.Compare(b.Time) })
	for _, ev := range list {
		if err := each(ev); err != nil {
			return err
		}
	}
	return nil
}

// note records an event of a sandbox.
func (evs *eventLog) note(id string, ev runtime.Event) error {
	ev.Sandbox, ev.Time = id, ev.Time.UTC()
	line, err := json.Marshal(ev)
	if err != nil {
		return err
	}
	return eventlog.Append(evs.dir(), id, append(line, '\n'))
}

// hits returns how often limits were hit; nil: never.
func (evs *eventLog) hits(id string, c runtime.Container) (*runtime.LimitHits, error) {
	out := c.Hits
	if c.OOMKilled && out.OOMKills == 0 {
		out.OOMKills = 1 // at least 1: its engine does not count
	}
	var err error
	if out.Storage, err = evs.storageHit(id); err != nil {
		return nil, err
	}
	if c.Pid > 0 {
		cgroups, err := kernel.Hierarchies()
		if err != nil {
			return nil, err
		}
		count, err := cgroups.HitsOf(c.Pid)
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ESRCH) { // it has just ended
			return nil, err
		}
		h := count()
		out.OOMKills, out.Pids = h.OOMKills, h.PidsMax
	}
	if out == (runtime.LimitHits{}) {
		return nil, nil
	}
	return &out, nil
}

// noteHits turns what the kernel has counted since the last call into events. It must be
// called before the next start, which resets the counters.
func (evs *eventLog) noteHits(ctx context.Context, sb store.Sandbox, c runtime.Container) error {
	h, err := evs.hits(sb.ID, c)
	if err != nil || h == nil || h.OOMKills+h.Pids == 0 {
		return err
	}
	s, err := spec(sb)
	if err != nil {
		return err
	}
	lock, err := evs.store.Lock(ctx, sb.ID+".events", "events", lockWait)
	if err != nil {
		return err
	}
	defer lock.Unlock()
	noted := map[string]int64{}
	// The separate counts have what the bounded log may have lost; the log has what was
	// noted right before a crash.
	kept, err := evs.countsOf(sb.ID)
	if err != nil {
		return err
	}
	if kept.Started.Equal(c.Started) {
		if h.OOMKills <= kept.OOM && h.Pids <= kept.Pids {
			return nil
		}
		noted[runtime.EventOOM], noted[runtime.EventPids] = kept.OOM, kept.Pids
	}
	log := eventlog.NewReader(evs.dir(), sb.ID)
	err = readEvents([]eventSource{{Reader: log, sandbox: sb.ID}}, runtime.EventOptions{},
		func(ev runtime.Event) error {
			if ev.Started.Equal(c.Started) {
				noted[ev.Type] = max(noted[ev.Type], ev.Total)
			}
			return nil
		})
	if err = errors.Join(err, log.Close()); err != nil {
		return err
	}
	now := time.Now()
	if c.Status == runtime.Exited && !c.Finished.IsZero() {
		now = c.Finished
	}

	add := func(typ string, total, limit int64, at time.Time) error {
		if total <= noted[typ] {
			return nil
		}
		ev := runtime.Event{
			Time: at, Type: typ, Count: total - noted[typ], Total: total, Started: c.Started.UTC(), Limit: limit,
		}
		noted[typ] = total
		return evs.note(sb.ID, ev)
	}
	if !c.OOMAt.IsZero() && noted[runtime.EventOOM] == 0 && h.OOMKills > 0 {
		err = add(runtime.EventOOM, 1, s.Resources.Memory, c.OOMAt)
	}
	err = errors.Join(err, add(runtime.EventOOM, h.OOMKills, s.Resources.Memory, now),
		add(runtime.EventPids, h.Pids, s.Resources.Pids, now))
	return errors.Join(err, evs.keepCounts(sb.ID, counts{
		c.Started.UTC(), noted[runtime.EventOOM], noted[runtime.EventPids],
	}))
}

// counts are the recorded values of the kernel's counters for one start.
type counts struct {
	Started time.Time `json:"started"`
	OOM     int64     `json:"oom"`
	Pids    int64     `json:"pids"`
}

func (evs *eventLog) countsPath(id string) string { return filepath.Join(evs.dir(), id+".counts") }

func (evs *eventLog) countsOf(id string) (counts, error) {
	var c counts
	data, err := os.ReadFile(evs.countsPath(id))
	if err == nil && json.Unmarshal(data, &c) != nil {
		c = counts{} // truncated by a power loss; the log has the counts
	}
	return c, ignoreMissing(err)
}

func (evs *eventLog) keepCounts(id string, c counts) error {
	data, err := json.Marshal(c)
	if err != nil {
		return err
	}
	path := evs.countsPath(id)
	// With its directory it went with its sandbox.
	return ignoreMissing(fsx.Write(path, data, fsx.Options{Temp: path + ".new", Volatile: true}))
}

// keepHits is noteHits for a verb that ignores its errors.
func (evs *eventLog) keepHits(ctx context.Context, sb store.Sandbox, c runtime.Container) {
	if err := evs.noteHits(ctx, sb, c); err != nil {
		evs.log.Warn("limit hits not recorded", "sandbox", sb.ID, "err", err)
	}
}

// forgetEvents removes the events of sandboxes that are gone: an event that was noted
// during the removal may have left some.
func (evs *eventLog) prune(ctx context.Context, but map[string]bool) error {
	list, err := os.ReadDir(evs.dir())
	if err != nil {
		return ignoreMissing(err)
	}
	var errs []error
	for _, entry := range list {
		id, _, _ := strings.Cut(entry.Name(), ".")
		if but[id] {
			continue
		}
		if _, err := evs.store.Sandbox(ctx, id); errors.Is(err, runtime.ErrNotFound) {
			errs = append(errs, evs.drop(id))
		} else if err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// dropEvents removes the events of a sandbox.
func (evs *eventLog) drop(id string) error {
	err := eventlog.Remove(evs.dir(), id)
	for _, name := range []string{evs.countsPath(id), evs.countsPath(id) + ".new"} {
		err = errors.Join(err, ignoreMissing(os.Remove(name)))
	}
	_ = os.Remove(evs.dir()) // stays while there are others
	return err
}
