package wall

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/agentbox/agentbox/criu/host"
)

// cgroupImage is a cgroup.img as far as a restore of a container needs it. Only the path is left
// of the container's own cgroup, which the OCI runtime has made with its limits; cgroups below,
// which processes have made, keep known properties.
type cgroupImage struct {
	sets        []cgroupSet
	controllers []controller
}

type cgroupSet struct {
	id      uint32
	members []member
}

type member struct {
	name   string // of the controller
	path   string
	prefix uint32 // how much of it the cgroup namespace hides; 0: it has none
	hidden bool
}

type controller struct {
	names    []string
	threaded bool
	dirs     []cgroupDir
}

type cgroupDir struct {
	name       string
	children   []cgroupDir
	properties []property
	perms      *perms
}

type property struct {
	name, value string
	perms       *perms
}

type perms struct{ mode, uid, gid uint32 }

const (
	maxCgroupDepth = 64
	maxCgroups     = 1 << 14
	maxValue       = 1 << 16
)

// cgroup is judged last, when it is known which sets processes are in.
func (j *judge) cgroup(string) error { return nil }

// ctlName is a controller's: it becomes a part of a path, and an option of a mount.
var ctlName = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^([a-z0-9_]+|name=[A-Za-z0-9_.-]+|)$`)
})

// propName is a file's of a cgroup. CRIU writes no others than those of its own list; what has
// the kernel run a program, or ends, freezes or moves processes, is on none.
var propName = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^(cpu|cpuset|memory|blkio|io|devices|freezer|net_cls|net_prio|hugetlb|pids|rdma|misc)\.[A-Za-z0-9_.]+$|^(cgroup\.(clone_children|procs|threads|type|subtree_control|max\.descendants|max\.depth)|notify_on_release|tasks)$`)
})

func (j *judge) checkCgroup() error {
	const name = "cgroup.img"
	if _, err := os.Lstat(filepath.Join(j.dir, name)); err != nil {
		return nil
	}
	data, err := j.read(name)
	if err != nil {
		return err
	}
	var img cgroupImage
	n := 0
	err = eachEntry(name, data, magicCgroup, 1, func(data []byte) (err error) {
		n++
		img, err = decodeCgroup(name, data)
		return err
	})
	if err != nil || n == 0 {
		return err
	}
	hierarchies, err := hostHierarchies("/proc/self/cgroup")
	if err != nil {
		return err
	}
	if err := img.judge(name, j.sets, hierarchies, j.own, j.spec); err != nil {
		return err
	}
	out := img.encode()
	out = append(protowire.AppendFixed32(head(magicCgroup), uint32(len(out))), out...)
	if bytes.Equal(out, data) {
		return nil
	}
	return host.Replace(filepath.Join(j.dir, name), out)
}

// hostHierarchies lists the controllers that this host has, each hierarchy's together.
func hostHierarchies(path string) (list [][]string, err error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(data)) {
		if f := strings.SplitN(strings.TrimSpace(line), ":", 3); len(f) == 3 {
			list = append(list, strings.Split(f[1], ","))
		}
	}
	return list, nil
}

func decodeCgroup(name string, data []byte) (img cgroupImage, err error) {
	m, err := decode(name, "cgroup_entry", data)
	if err != nil {
		return img, err
	}
	sets, err := m.inners(1, "cg_set_entry")
	if err != nil {
		return img, err
	}
	for _, s := range sets {
		if err := s.once(fields(1), nil); err != nil {
			return img, err
		}
		set := cgroupSet{id: s.number(1)}
		members, err := s.inners(2, "cg_member_entry")
		if err != nil {
			return img, err
		}
		for _, c := range members {
			if err := c.once(fields(3), fields(1, 2)); err != nil {
				return img, err
			}
			set.members = append(set.members, member{c.text(1), c.text(2), c.number(3), c.has(3)})
		}
		img.sets = append(img.sets, set)
	}
	list, err := m.inners(2, "cg_controller_entry")
	if err != nil {
		return img, err
	}
	count := 0
	for _, c := range list {
		if err := c.once(fields(3), nil); err != nil {
			return img, err
		}
		ctl := controller{threaded: c.wide(3) != 0}
		for _, n := range c.raw[1] {
			ctl.names = append(ctl.names, string(n))
		}
		if ctl.dirs, err = decodeDirs(c, 0, &count); err != nil {
			return img, err
		}
		img.controllers = append(img.controllers, ctl)
	}
	return img, nil
}

func decodeDirs(m *message, depth int, count *int) (dirs []cgroupDir, err error) {
	list, err := m.inners(2, "cgroup_dir_entry")
	if err != nil {
		return nil, err
	}
	for _, d := range list {
		if *count++; *count > maxCgroups || depth == maxCgroupDepth {
			return nil, m.damaged("has more cgroups than any dump")
		}
		if err := d.once(nil, fields(1, 4)); err != nil {
			return nil, err
		}
		dir := cgroupDir{name: d.text(1)}
		if dir.perms, err = decodePerms(d, 4); err != nil {
			return nil, err
		}
		props, err := d.inners(3, "cgroup_prop_entry")
		if err != nil {
			return nil, err
		}
		for _, p := range props {
			if err := p.once(nil, fields(1, 2, 3)); err != nil {
				return nil, err
			}
			prop := property{name: p.text(1), value: p.text(2)}
			if prop.perms, err = decodePerms(p, 3); err != nil {
				return nil, err
			}
			dir.properties = append(dir.properties, prop)
		}
		if dir.children, err = decodeDirs(d, depth+1, count); err != nil {
			return nil, err
		}
		dirs = append(dirs, dir)
	}
	return dirs, nil
}

func decodePerms(m *message, n protowire.Number) (*perms, error) {
	p, err := m.inner(n, "cgroup_perms")
	if err != nil || p == nil {
		return nil, err
	}
	return &perms{p.number(1), p.number(2), p.number(3)}, p.once(fields(1, 2, 3), nil)
}

// judge refuses paths outside of the container's cgroup, drops what is not known or the
// OCI runtime's, and, where the container's cgroup is known, moves all there.
func (img *cgroupImage) judge(name string, used map[uint32]bool, hierarchies [][]string, own string, spec *Spec) error {
	here := func(ctl string) bool {
		return slices.ContainsFunc(hierarchies, func(h []string) bool { return slices.Contains(h, ctl) })
	}
	tops := map[string]string{} // by controller: the container's cgroup at the dump
	var kept []controller
	for _, c := range img.controllers {
		for _, n := range c.names {
			if !ctlName().MatchString(n) {
				return refuse(name, "cnames", "%s is no controller's name", quoted(n))
			}
		}
		// One that this host does not have CRIU would mount.
		if len(c.names) == 0 || !slices.ContainsFunc(hierarchies, func(h []string) bool {
			return !slices.ContainsFunc(c.names, func(n string) bool { return !slices.Contains(h, n) })
		}) {
			if len(c.names) > 0 && !slices.ContainsFunc(c.names, here) {
				continue
			}
			return refuse(name, "cnames", "%v are not together on this host", c.names)
		}
		if len(c.dirs) > 1 {
			return refuse(name, "dirs", "controller %v has %d cgroups, none in the other", c.names, len(c.dirs))
		}
		for i := range c.dirs {
			d := &c.dirs[i]
			if !clean("/"+d.name) || strings.ContainsRune(d.name, '\n') {
				return refuse(name, "dir_name", "%s leads elsewhere", quoted(d.name))
			}
			for _, n := range c.names {
				if _, twice := tops[n]; twice {
					return refuse(name, "cnames", "controller %q is there twice", n)
				}
				tops[n] = "/" + d.name
			}
			// The OCI runtime's: it is there, with its limits and its owner.
			d.properties, d.perms = nil, nil
			if d.name == "" && len(d.children) > 0 {
				return refuse(name, "dir_name", "the container's cgroup would be that of all processes of the host")
			}
			for k := range d.children {
				if err := d.children[k].judge(name, spec); err != nil {
					return err
				}
				if own == "" && here("") && len(hierarchies) == 1 {
					d.children[k].plain() // CRIU is not told where the container's is now
				}
			}
		}
		kept = append(kept, c)
	}
	img.controllers = kept

	var sets []cgroupSet
	ids, at := map[uint32]bool{}, map[string]bool{}
	for _, s := range img.sets {
		if ids[s.id] {
			return refuse(name, "sets", "two have the id %d", s.id)
		}
		ids[s.id] = true
		if !used[s.id] {
			continue // CRIU's own
		}
		var members []member
		for _, m := range s.members {
			if !ctlName().MatchString(m.name) {
				return refuse(name, "name", "%s is no controller's name", quoted(m.name))
			}
			if !here(m.name) {
				continue
			}
			top, is := tops[m.name]
			if !is {
				return refuse(name, "path", "controller %q has no cgroups", m.name)
			}
			if !clean(m.path) || !below(m.path, top) || top == "/" && m.path != top ||
				strings.ContainsRune(m.path, '\n') {
				return refuse(name, "path", "%s is not below the container's %s", quoted(m.path), quoted(top))
			}
			if m.hidden && (int64(m.prefix) > int64(len(m.path)) ||
				m.path[:m.prefix] != strings.TrimSuffix(top, "/") && m.path[:m.prefix] != top) {
				return refuse(name, "cgns_prefix",
					"the cgroup namespace of %s is not the container's", quoted(m.path))
			}
			if own != "" {
				m.path = filepath.Join(own, strings.TrimPrefix(m.path, top))
				m.prefix = uint32(len(own))
			}
			members = append(members, m)
			at[m.name] = true
		}
		s.members = members
		sets = append(sets, s)
	}
	img.sets = sets
	// CRIU moves to the container's cgroup of now what a process is in.
	img.controllers = slices.DeleteFunc(img.controllers, func(c controller) bool {
		return !slices.ContainsFunc(c.names, func(n string) bool { return at[n] })
	})
	if own != "" {
		for _, c := range img.controllers {
			for i := range c.dirs {
				c.dirs[i].name = strings.TrimPrefix(own, "/")
			}
		}
	}
	return nil
}

// judge looks at a cgroup below the container's.
func (d *cgroupDir) judge(name string, spec *Spec) error {
	if d.name == "" || d.name == "." || d.name == ".." || strings.ContainsAny(d.name, "/\n\x00") {
		return refuse(name, "dir_name", "%s leads elsewhere", quoted(d.name))
	}
	if err := d.perms.judge(name, spec); err != nil {
		return err
	}
	var kept []property
	for _, p := range d.properties {
		if strings.ContainsAny(p.name, "/\x00") {
			return refuse(name, "properties", "%s leads elsewhere", quoted(p.name))
		}
		if !propName().MatchString(p.name) || len(p.value) > maxValue {
			continue
		}
		if err := p.perms.judge(name, spec); err != nil {
			return err
		}
		kept = append(kept, p)
	}
	d.properties = kept
	for i := range d.children {
		if err := d.children[i].judge(name, spec); err != nil {
			return err
		}
	}
	return nil
}

// plain leaves of a cgroup, and those below, that they are there.
func (d *cgroupDir) plain() {
	d.properties, d.perms = nil, nil
	for i := range d.children {
		d.children[i].plain()
	}
}

func (p *perms) judge(name string, spec *Spec) error {
	if p == nil {
		return nil
	}
	p.mode &= 0o170777
	if spec.namespace("user") == nil {
		return nil
	}
	for _, id := range []struct {
		what string
		id   uint32
		maps []IDs
	}{{"uid", p.uid, spec.Linux.UIDMappings}, {"gid", p.gid, spec.Linux.GIDMappings}} {
		ours := slices.ContainsFunc(id.maps, func(m IDs) bool {
			return id.id >= m.Host && uint64(id.id) < uint64(m.Host)+uint64(m.Size)
		})
		if id.id != 0 && !ours {
			return refuse(name, "perms", "%s %d is none of the container's", id.what, id.id)
		}
	}
	return nil
}

func (img cgroupImage) encode() (out []byte) {
	put := func(b []byte, n protowire.Number, inner []byte) []byte {
		return protowire.AppendBytes(protowire.AppendTag(b, n, protowire.BytesType), inner)
	}
	number := func(b []byte, n protowire.Number, v uint64) []byte {
		return protowire.AppendVarint(protowire.AppendTag(b, n, protowire.VarintType), v)
	}
	for _, s := range img.sets {
		b := number(nil, 1, uint64(s.id))
		for _, m := range s.members {
			c := put(put(nil, 1, []byte(m.name)), 2, []byte(m.path))
			if m.hidden {
				c = number(c, 3, uint64(m.prefix))
			}
			b = put(b, 2, c)
		}
		out = put(out, 1, b)
	}
	encodePerms := func(p *perms) []byte {
		return number(number(number(nil, 1, uint64(p.mode)), 2, uint64(p.uid)), 3, uint64(p.gid))
	}
	var dir func(d cgroupDir) []byte
	dir = func(d cgroupDir) []byte {
		b := put(nil, 1, []byte(d.name))
		for _, c := range d.children {
			b = put(b, 2, dir(c))
		}
		for _, p := range d.properties {
			c := put(put(nil, 1, []byte(p.name)), 2, []byte(p.value))
			if p.perms != nil {
				c = put(c, 3, encodePerms(p.perms))
			}
			b = put(b, 3, c)
		}
		if d.perms != nil {
			b = put(b, 4, encodePerms(d.perms))
		}
		return b
	}
	for _, c := range img.controllers {
		var b []byte
		for _, n := range c.names {
			b = put(b, 1, []byte(n))
		}
		for _, d := range c.dirs {
			b = put(b, 2, dir(d))
		}
		if c.threaded {
			b = number(b, 3, 1)
		}
		out = put(out, 2, b)
	}
	return out
}
