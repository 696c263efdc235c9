package proof

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Difference is what a restored process has, or is, that it had not, or was not.
type Difference struct {
	Pid  int    `json:"pid"`
	What string `json:"what"` // a sentence without its subject: "file descriptor 5 is ..."
	// Fatal: the process is another one, and must not run.
	Fatal bool `json:"fatal,omitempty"`
	// Inode: a directory was made anew, as all of a fork are.
	Inode bool `json:"inode,omitempty"`
}

func (d Difference) String() string { return fmt.Sprintf("process %d: %s", d.Pid, d.What) }

// Compare names what is different in got from what is in want.
func Compare(want, got Record) (list []Difference) {
	for _, w := range want.Tasks {
		at := slices.IndexFunc(got.Tasks, func(g Task) bool { return g.Pid == w.Pid })
		switch {
		case w.Zombie: // what CRIU makes of it may have been reaped
		case at < 0 || got.Tasks[at].Zombie:
			list = append(list, Difference{Pid: w.Pid, What: "it is gone", Fatal: true})
		default:
			list = append(list, compareTask(w, got.Tasks[at])...)
		}
	}
	for _, g := range got.Tasks {
		if !slices.ContainsFunc(want.Tasks, func(w Task) bool { return g.Pid == w.Pid }) {
			list = append(list, Difference{Pid: g.Pid, What: "it was not there", Fatal: true})
		}
	}
	return list
}

func compareTask(w, g Task) (list []Difference) {
	differ := func(fatal bool, what string, want, got any) {
		if want != got {
			list = append(list, Difference{Pid: w.Pid, What: fmt.Sprintf("its %s is %q, and was %q", what,
				fmt.Sprint(got), fmt.Sprint(want)), Fatal: fatal})
		}
	}
	differ(true, "parent", w.Parent, g.Parent)
	differ(true, "process group", w.Group, g.Group)
	differ(true, "session", w.Session, g.Session)
	differ(true, "set of ignored signals", w.Ignored, g.Ignored)
	differ(true, "set of caught signals", w.Caught, g.Caught)
	differ(true, "root directory", undeleted(w.Root), undeleted(g.Root))
	differ(true, "working directory", undeleted(w.Cwd), undeleted(g.Cwd))
	list = append(list, madeAnew(w.Pid, "its working directory", w.Cwd, w.CwdIno, g.CwdIno)...)
	differ(true, "program", undeleted(w.Exe), undeleted(g.Exe))
	differ(true, "umask", w.Umask, g.Umask)
	if lost := signalsLost(w.Pending, g.Pending); lost != "" {
		list = append(list, Difference{Pid: w.Pid, What: "signals that waited for it are gone: " + lost})
	}
	differ(false, "oom_score_adj", w.OOM, g.OOM)
	differ(false, "coredump_filter", w.Core, g.Core)
	differ(false, "personality", w.Persona, g.Persona)
	differ(false, "use of huge pages (PR_SET_THP_DISABLE)", w.THP, g.THP)
	differ(false, "list of limits", strings.Join(w.Limits, "; "), strings.Join(g.Limits, "; "))
	differ(true, "list of POSIX timers", strings.Join(w.Timers, "; "), strings.Join(g.Timers, "; "))
	for _, wt := range w.Threads {
		at := slices.IndexFunc(g.Threads, func(gt Thread) bool { return gt.Tid == wt.Tid })
		if at < 0 {
			list = append(list, Difference{Pid: w.Pid, What: fmt.Sprintf("its thread %d is gone", wt.Tid), Fatal: true})
			continue
		}
		gt := g.Threads[at]
		of := func(what string) string { return fmt.Sprintf("%s of thread %d", what, wt.Tid) }
		differ(false, of("name"), wt.Name, gt.Name)
		differ(true, of("set of user ids"), wt.Uids, gt.Uids)
		differ(true, of("set of group ids"), wt.Gids, gt.Gids)
		differ(true, of("list of groups"), wt.Groups, gt.Groups)
		differ(true, of("set of capabilities"), wt.Caps, gt.Caps)
		differ(true, of("no_new_privs"), wt.NoPrivs, gt.NoPrivs)
		if !oneMore(wt.Seccomp, gt.Seccomp) {
			differ(true, of("seccomp mode"), wt.Seccomp, gt.Seccomp)
		}
		if wt.Blocked != "" && gt.Blocked != "" {
			differ(true, of("set of blocked signals"), wt.Blocked, gt.Blocked)
		}
		if lost := signalsLost(wt.Pending, gt.Pending); lost != "" {
			list = append(list, Difference{
				Pid: w.Pid, What: fmt.Sprintf("signals that waited for its thread %d are gone: %s", wt.Tid, lost),
			})
		}
		differ(false, of("set of processors"), wt.CPUs, gt.CPUs)
		differ(false, of("timer slack"), wt.Slack, gt.Slack)
		differ(false, of("scheduling policy"), wt.Policy, gt.Policy)
		differ(false, of("priority"), wt.Priority, gt.Priority)
		differ(false, of("nice value"), wt.Nice, gt.Nice)
		differ(false, of("I/O priority"), wt.IO, gt.IO)
	}
	if len(g.Threads) > len(w.Threads) {
		list = append(list, Difference{Pid: w.Pid, What: fmt.Sprintf("it has %d threads, and had %d", len(g.Threads),
			len(w.Threads)), Fatal: true})
	}
	return slices.Concat(list, compareFDs(w, g), compareLocks(w, g))
}

// oneMore reports whether a thread has a filter more, in the same mode: a restore lays one over
// those that let through what the container's refuses.
func oneMore(want, got string) bool {
	var mode, filters, gotMode, gotFilters int
	n, _ := fmt.Sscan(want, &mode, &filters)
	m, _ := fmt.Sscan(got, &gotMode, &gotFilters)
	return n == 2 && m == 2 && mode == 2 && gotMode == mode && gotFilters == filters+1
}

// signalsLost lists, by their numbers, the signals of one mask that another lacks. A
// restored process may have more: a timer that ran out, a child that stopped.
func signalsLost(want, got string) string {
	w, _ := strconv.ParseUint(want, 16, 64)
	g, _ := strconv.ParseUint(got, 16, 64)
	var list []string
	for n := 1; n <= 64; n++ {
		if bit := uint64(1) << (n - 1); w&^g&bit != 0 {
			list = append(list, strconv.Itoa(n))
		}
	}
	return strings.Join(list, ", ")
}

// madeAnew tells of a directory that was removed since the dump. No restore brings its inode
// number back, by which some programs (tar, rm -r) know the directory that they work in.
func madeAnew(pid int, which, path string, want, got uint64) []Difference {
	if want == 0 || got == 0 || want == got || undeleted(path) != path {
		return nil
	}
	what := fmt.Sprintf("%s (%s) was made anew, and has the inode number %d instead of %d: a program that compares them fails", which, path, got, want)
	return []Difference{{Pid: pid, What: what, Inode: true}}
}

func compareFDs(w, g Task) (list []Difference) {
	for _, wf := range w.FDs {
		at := slices.IndexFunc(g.FDs, func(gf FD) bool { return gf.N == wf.N })
		if at < 0 {
			list = append(list, Difference{Pid: w.Pid, What: fmt.Sprintf("its file descriptor %d (%s) is gone", wf.N,
				wf.Target), Fatal: true})
			continue
		}
		gf := g.FDs[at]
		differ := func(fatal bool, what string, want, got any) {
			if want != got {
				list = append(list, Difference{
					Pid: w.Pid, What: fmt.Sprintf("%s of its file descriptor %d (%s) is %q, and was %q", what, wf.N,
						wf.Target, fmt.Sprint(got), fmt.Sprint(want)), Fatal: fatal,
				})
			}
		}
		differ(true, "the target", undeleted(wf.Target), undeleted(gf.Target))
		list = append(list, madeAnew(w.Pid, fmt.Sprintf("the directory of its file descriptor %d", wf.N),
			wf.Target, wf.Ino, gf.Ino)...)
		differ(true, "the object", wf.Object, gf.Object)
		differ(true, "the set of flags", fmt.Sprintf("%o", wf.Flags), fmt.Sprintf("%o", gf.Flags))
		differ(true, "the position", wf.Pos, gf.Pos)
		differ(false, "the owner", wf.Owner, gf.Owner)
		differ(false, "the semaphore flag", wf.Semaphore, gf.Semaphore)
		differ(true, "the count", wf.Count, gf.Count)
		differ(true, "the signal mask", wf.Mask, gf.Mask)
		differ(true, "the clock", wf.Clock, gf.Clock)
		list = append(list, compareSockets(w.Pid, wf.N, wf.Socket, gf.Socket)...)
	}
	for _, gf := range g.FDs {
		if !slices.ContainsFunc(w.FDs, func(wf FD) bool { return wf.N == gf.N }) {
			list = append(list, Difference{Pid: w.Pid, What: fmt.Sprintf("its file descriptor %d (%s) was not there",
				gf.N, gf.Target), Fatal: true})
		}
	}
	return list
}

func compareLocks(w, g Task) (list []Difference) {
	for _, l := range missing(w, g) {
		list = append(list, Difference{Pid: w.Pid, What: "its " + l.String() + " is gone", Fatal: true})
	}
	for _, l := range missing(g, w) {
		list = append(list, Difference{Pid: w.Pid, What: "its " + l.String() + " was not there", Fatal: true})
	}
	return list
}

// missing lists the locks that one has and the other has not.
func missing(has, lacks Task) (list []Lock) {
	for _, l := range has.Locks {
		if !slices.ContainsFunc(lacks.Locks, func(o Lock) bool { return o.key() == l.key() }) {
			list = append(list, l)
		}
	}
	return list
}

func (l Lock) String() string {
	kind, end := "read", "the end"
	if l.Write {
		kind = "write"
	}
	if l.End >= 0 {
		end = fmt.Sprint(l.End)
	}
	return fmt.Sprintf("%s %s lock of %s from %d to %s", l.Kind, kind, l.Path, l.Start, end)
}

// undeleted returns a path whether or not its file has it still: CRIU gives a deleted
// file a name of its own for a moment.
func undeleted(path string) string {
	if strings.HasSuffix(path, " (deleted)") {
		return "(deleted)"
	}
	return path
}
