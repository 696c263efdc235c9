package wall

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/agentbox/agentbox/internal/fault"
)

// The numbers of fields are those of CRIU's images/*.proto.

func (j *judge) inventory(name string) error {
	const version, rootIDs, runID = 1, 3, 13
	m, err := j.one(name, magicInventory, "inventory_entry")
	if err != nil {
		return err
	}
	if err := m.once(fields(version), fields(rootIDs, runID)); err != nil {
		return err
	}
	// By another version the other images would begin otherwise.
	if v := m.number(version); v != 2 {
		return refuse(name, "img_version", "%d is not known to this version of agentbox", v)
	}
	// It becomes a part of the name of an nftables table.
	if id := m.text(runID); strings.Trim(id, "0123456789abcdefABCDEF-") != "" || len(id) > 64 {
		return refuse(name, "dump_criu_run_id", "%s is no UUID", quoted(id))
	}
	if j.outside, err = m.inner(rootIDs, "root_ids"); err != nil || j.outside == nil {
		return err
	}
	return j.outside.once(fields(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12), nil)
}

func (j *judge) pstree(name string) error {
	const pid, ppid, threads = 1, 2, 5
	return j.each(name, magicPstree, 1<<17, func(data []byte) error {
		m, err := decode(name, "pstree_entry", data)
		if err != nil {
			return err
		}
		if err := m.once(fields(pid, ppid, 3, 4), nil); err != nil {
			return err
		}
		list, err := m.numbers(threads)
		if err != nil {
			return err
		}
		for _, id := range list {
			j.leaders[coreImage(id)] = coreImage(m.number(pid))
		}
		if m.number(ppid) != 0 {
			return nil
		}
		if j.first != "" {
			return refuse(name, "ppid", "two processes have no parent")
		}
		j.first = fmt.Sprintf("ids-%d.img", m.number(pid))
		return nil
	})
}

func coreImage(id uint32) string { return fmt.Sprintf("core-%d.img", id) }

func (j *judge) ids(name string) error {
	m, err := j.one(name, magicIDs, "task_kobj_ids_entry")
	if err != nil {
		return err
	}
	return m.once(fields(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12), nil)
}

// checkNamespaces proves that CRIU makes the namespaces that the spec has: it makes one
// where the first process's id is not that of CRIU at the dump. The other processes'
// are CRIU's to compare with the first's.
func (j *judge) checkNamespaces() error {
	if j.first == "" {
		return fmt.Errorf("image pstree.img has no first process: %w", fault.ErrCorrupt)
	}
	first, err := j.one(j.first, magicIDs, "task_kobj_ids_entry")
	if err != nil {
		return err
	}
	if j.outside == nil {
		return refuse("inventory.img", "root_ids",
			"there are none, so that all processes would be in the host's namespaces")
	}
	for _, ns := range []struct {
		typ string
		id  protowire.Number
	}{{"pid", 5}, {"network", 6}, {"ipc", 7}, {"uts", 8}, {"mount", 9}, {"user", 10}} {
		own, has := first.number(ns.id) != j.outside.number(ns.id), j.spec.namespace(ns.typ)
		switch {
		case has != nil && has.Path == "" && !own:
			return refuse(j.first, ns.typ+" namespace", "the first process is in the host's")
		case has == nil && own:
			return refuse(j.first, ns.typ+" namespace",
				"the first process is in one of its own, and the container has the host's")
		}
	}
	return nil
}

func (j *judge) userns(name string) error {
	m, err := j.one(name, magicUserns, "userns_entry")
	if err != nil {
		return err
	}
	if err := m.only(1, 2); err != nil {
		return err
	}
	ns := j.spec.namespace("user")
	if ns == nil {
		return refuse(name, "userns_entry", "the container has no user namespace")
	}
	if ns.Path != "" {
		return nil // joined, and looked at afterwards
	}
	for _, is := range []struct {
		field protowire.Number
		name  string
		want  []IDs
	}{{1, "uid_map", j.spec.Linux.UIDMappings}, {2, "gid_map", j.spec.Linux.GIDMappings}} {
		list, err := m.inners(is.field, is.name)
		if err != nil {
			return err
		}
		var got []IDs
		for _, e := range list {
			if err := e.only(1, 2, 3); err != nil {
				return err
			}
			if err := e.once(fields(1, 2, 3), nil); err != nil {
				return err
			}
			got = append(got, IDs{e.number(1), e.number(2), e.number(3)})
		}
		if !sameIDs(got, is.want) {
			return refuse(name, is.name, "it is %v, and the container's is %v", got, is.want)
		}
	}
	return nil
}

func sameIDs(a, b []IDs) bool {
	order := func(x, y IDs) int { return int(int64(x.Container) - int64(y.Container)) }
	a, b = slices.Clone(a), slices.Clone(b)
	slices.SortFunc(a, order)
	slices.SortFunc(b, order)
	return slices.Equal(a, b)
}

func (j *judge) utsns(name string) error {
	const longest = 64
	m, err := j.one(name, magicUtsns, "utsns_entry")
	if err != nil {
		return err
	}
	if err := m.once(nil, fields(1, 2)); err != nil {
		return err
	}
	if len(m.text(1)) > longest || len(m.text(2)) > longest {
		return refuse(name, "nodename", "it is longer than %d bytes", longest)
	}
	return nil
}

// pidns judges a pid namespace: one that has a key is found on the host by it.
func (j *judge) pidns(name string) error {
	m, err := j.one(name, magicPidns, "pidns_entry")
	if err != nil {
		return err
	}
	if ns := j.spec.namespace("pid"); len(m.order) > 0 && (ns == nil || ns.Path == "") {
		return refuse(name, "ext_key", "the container's pid namespace is its own")
	}
	return nil
}

// mm judges the memory of a process: what is mapped is among the open files, which are judged.
func (j *judge) mm(name string) error {
	const vmas, status, plugin = 14, 7, 1 << 27
	m, err := j.one(name, magicMM, "mm_entry")
	if err != nil {
		return err
	}
	list, err := m.inners(vmas, "vma_entry")
	if err != nil {
		return err
	}
	for _, v := range list {
		if err := v.once(fields(1, 2, 3, 4, 5, 6, status, 8, 9, 10), nil); err != nil {
			return err
		}
		if v.number(status)&plugin != 0 {
			return refuse(name, "status", "a plugin of CRIU's would map memory at %#x", v.wide(1))
		}
	}
	return nil
}

// States of a process that has ended, which has no rights.
const taskDead, taskZombie = 2, 6

func (j *judge) core(name string) (err error) {
	const task, thread = 3, 5
	m, err := j.one(name, magicCore, "core_entry")
	if err != nil {
		return err
	}
	if err := m.once(fields(1), fields(task, thread)); err != nil {
		return err
	}
	defer func() {
		if err == nil {
			err = j.limit(name)
		}
	}()
	tc, err := m.inner(task, "tc")
	if err != nil {
		return err
	}
	ended := false
	if tc != nil {
		if err := j.task(name, tc); err != nil {
			return err
		}
		state := tc.number(1)
		ended = state == taskDead || state == taskZombie
	}
	th, err := m.inner(thread, "thread_core")
	if err != nil {
		return err
	}
	if ended {
		return nil
	}
	if th == nil {
		return refuse(name, "thread_core", "it has none, so that it would have the rights of CRIU")
	}
	return j.thread(name, th)
}

// limit takes from a thread, which is judged, what the container of now does not give:
// capabilities that are usual elsewhere, and new privileges.
func (j *judge) limit(name string) error {
	const thread, credentials, noNewPrivs = 5, 10, 18
	most := j.spec.bounding()
	return j.rewrite(name, magicCore, func(entry []byte) []byte {
		return changing(entry, thread, func(th []byte) []byte {
			return changing(th, credentials, func(creds []byte) []byte {
				for set := range capSets {
					creds = masking(creds, set, [2]uint32{uint32(most), uint32(most >> 32)})
				}
				if j.spec.Process.NoNewPrivileges {
					creds = withNumber(changing(creds, noNewPrivs, nil), noNewPrivs, 1)
				}
				return creds
			})
		})
	})
}

// limits are the names of the resource limits, in the order of their numbers.
var limits = []string{
	"CPU", "FSIZE", "DATA", "STACK", "CORE", "RSS", "NPROC", "NOFILE", "MEMLOCK", "AS", "LOCKS", "SIGPENDING",
	"MSGQUEUE", "NICE", "RTPRIO", "RTTIME",
}

// task judges what a process has as a whole.
func (j *judge) task(name string, tc *message) error {
	const rlimits, set, oldMode, oldFilter, oom = 8, 9, 11, 12, 14
	if err := tc.once(fields(1, set, oldMode, oldFilter, oom), fields(rlimits)); err != nil {
		return err
	}
	if tc.has(set) {
		j.sets[tc.number(set)] = true
	}
	if tc.has(oldMode) || tc.has(oldFilter) {
		j.filterR = append(j.filterR, filterRef{name, tc.number(oldMode), tc.number(oldFilter), true})
	}
	if score := int(int32(tc.number(oom))); score < min(0, j.score()) && !j.spec.can("SYS_RESOURCE") {
		return refuse(name, "oom_score_adj", "%d is below the container's %d", score, j.score())
	}
	in, err := tc.inner(rlimits, "rlimits")
	if err != nil || in == nil || j.spec.can("SYS_RESOURCE") {
		return err
	}
	list, err := in.inners(1, "rlimit")
	if err != nil {
		return err
	}
	for i, l := range list {
		if err := l.once(fields(1, 2), nil); err != nil {
			return err
		}
		for _, may := range j.spec.Process.Rlimits {
			if i < len(limits) && may.Type == "RLIMIT_"+limits[i] && l.wide(2) > may.Hard {
				return refuse(name, may.Type, "its hard limit %d is above the container's %d", l.wide(2), may.Hard)
			}
		}
	}
	return nil
}

// score is the oom_score_adj of the container's processes to begin with.
func (j *judge) score() int {
	if s := j.spec.Process.OOMScoreAdj; s != nil {
		return *s
	}
	data, _ := os.ReadFile("/proc/self/oom_score_adj")
	n, _ := strconv.Atoi(strings.TrimSpace(string(data)))
	return n
}

func (j *judge) thread(name string, th *message) error {
	const policy, prio, credentials, mode, chain, set = 4, 5, 10, 11, 12, 16
	if err := th.once(fields(3, policy, prio, mode, chain, set), fields(credentials)); err != nil {
		return err
	}
	if th.has(set) {
		j.sets[th.number(set)] = true
	}
	if th.has(mode) || j.spec.filtered() {
		j.filterR = append(j.filterR, filterRef{name, th.number(mode), th.number(chain), false})
	}
	switch p := th.number(policy) &^ (1 << 30); p {
	case 0, 3, 5, 7: // other, batch, idle, ext
	default:
		realtime := slices.ContainsFunc(j.spec.Process.Rlimits, func(l struct {
			Type string `json:"type"`
			Hard uint64 `json:"hard"`
		}) bool {
			return l.Type == "RLIMIT_RTPRIO" && l.Hard >= uint64(th.number(prio))
		})
		if !j.spec.can("SYS_NICE") && !realtime {
			return refuse(name, "sched_policy", "%d takes CAP_SYS_NICE, which the container has not", p)
		}
	}
	c, err := th.inner(credentials, "creds")
	if err != nil {
		return err
	}
	if c == nil {
		return refuse(name, "creds", "it has none, so that it would have the rights of CRIU")
	}
	return j.creds(name, c)
}

// capSets are the sets of capabilities in a creds_entry.
var capSets = map[protowire.Number]string{9: "cap_inh", 10: "cap_prm", 11: "cap_eff", 12: "cap_bnd", 19: "cap_amb"}

// usual are the capabilities that engines, and earlier versions of agentbox, give every
// container. A process that comes from there goes on with what its container of now has of
// them; one with others was never in such a container.
const usual = 0xa80425fb

func (j *judge) creds(name string, c *message) error {
	const secbits, noNewPrivs = 13, 18
	if err := c.only(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19); err != nil {
		return err
	}
	if err := c.once(fields(1, 2, 3, 4, 5, 6, 7, 8, secbits, noNewPrivs), fields(15, 16, 17)); err != nil {
		return err
	}
	if c.has(17) {
		return refuse(name, "apparmor_data", "no container of an engine has AppArmor policy of its own")
	}
	for n, set := range capSets {
		words, err := c.numbers(n)
		if err != nil {
			return err
		}
		for i, word := range words {
			if i > 1 && word != 0 {
				return refuse(name, set, "it has capabilities that no kernel has")
			}
			if more := uint64(word) << (32 * (i & 1)) &^ (j.spec.bounding() | usual); i < 2 && more != 0 {
				return refuse(name, set, "the container cannot have %s", capNames(more))
			}
		}
	}
	return nil
}

// capNames lists capabilities.
func capNames(bits uint64) string {
	var list []string
	for i := range 64 {
		if bits&(1<<i) == 0 {
			continue
		}
		if i < len(capabilities) {
			list = append(list, capabilities[i])
		} else {
			list = append(list, fmt.Sprint(i))
		}
	}
	return strings.Join(list, " ")
}
