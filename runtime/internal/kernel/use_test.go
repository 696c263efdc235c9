package kernel

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

// The kernel's files under v1, under v2, and on a hybrid host, where v2 counts processor time as
// well. Package test has the kernel that is here.
func TestUse(t *testing.T) {
	v1 := map[string]string{
		"cpu/box/cpuacct.usage":            "1500000000\n",
		"memory/box/memory.usage_in_bytes": "5000000\n",
		"memory/box/memory.stat":           "inactive_file 1\ntotal_inactive_file 1000000\n",
		"memory/box/memory.limit_in_bytes": "9223372036854771712\n",
		"pids/box/pids.current":            "3\n",
		"pids/box/pids.max":                "max\n",
		"memory/memory.usage_in_bytes":     "7\n",
	}
	v2 := map[string]string{
		"unified/box/cpu.stat":       "usage_usec 1500000\nuser_usec 1\n",
		"unified/box/memory.current": "5000000\n",
		"unified/box/memory.stat":    "anon 1\ninactive_file 1000000\n",
		"unified/box/memory.max":     "67108864\n",
		"unified/box/pids.current":   "3\n",
		"unified/box/pids.max":       "20\n",
	}
	for _, tc := range []struct {
		name  string
		files []map[string]string
		proc  string
		want  Use
	}{
		{
			"v1", []map[string]string{v1}, "5:pids:/box\n4:memory:/box\n3:cpu,cpuacct:/box\n1:name=systemd:/other\n",
			Use{1500 * time.Millisecond, 4000000, 0, 3, 0},
		},
		{"v2", []map[string]string{v2}, "0::/box\n", Use{1500 * time.Millisecond, 4000000, 64 << 20, 3, 20}},
		{
			"hybrid", []map[string]string{v1, {"unified/service/cpu.stat": "usage_usec 99000000\n"}},
			"5:pids:/box\n4:memory:/box\n3:cpu,cpuacct:/box\n0::/service\n",
			Use{1500 * time.Millisecond, 4000000, 0, 3, 0},
		},
		{"none of its own", []map[string]string{v1}, "4:memory:/\n0::/\n", Use{}},
		{"nonsense", []map[string]string{v1}, "\n4:memory\n9:x:/box\n", Use{}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			root := t.TempDir()
			for _, files := range tc.files {
				for name, text := range files {
					path := filepath.Join(root, name)
					must(t, os.MkdirAll(filepath.Dir(path), 0o700))
					must(t, os.WriteFile(path, []byte(text), 0o600))
				}
			}
			groups := Cgroups{{Path: filepath.Join(root, "unified"), V2: true}}
			for dir, options := range map[string][]string{
				"cpu": {"rw", "cpu", "cpuacct"}, "memory": {"rw", "memory"}, "pids": {"rw", "pids"},
			} {
				groups = append(groups, Hierarchy{Path: filepath.Join(root, dir), options: options})
			}
			if got := groups.use(tc.proc); got != tc.want {
				t.Errorf("%+v, want %+v", got, tc.want)
			}
		})
	}
	if _, err := (Cgroups{}).UseOf(1 << 30); err == nil {
		t.Error("a process that is not there uses something")
	}
}
