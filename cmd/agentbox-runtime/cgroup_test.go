package main

import "testing"

func TestCgroupOf(t *testing.T) {
	for _, c := range []struct {
		path    string
		systemd bool
		want    string
	}{
		{"/agentbox/1-2", false, "/agentbox/1-2"},
		{"/agentbox/1-2/", true, "/agentbox/1-2"},
		{"", false, ""},
		{"box", false, ""},
		{"system.slice:docker:1f", true, "/system.slice/docker-1f.scope"},
		{":docker:1f", true, "/system.slice/docker-1f.scope"},
		{"-.slice:docker:1f", true, "/docker-1f.scope"},
		{"kube-pods-a.slice:cri:1f", true, "/kube.slice/kube-pods.slice/kube-pods-a.slice/cri-1f.scope"},
		{"user.slice::own.slice", true, "/user.slice/own.slice"},
		{"system.slice:docker:1f", false, ""},
	} {
		if got, err := cgroupOf(c.path, c.systemd); err != nil || got != c.want {
			t.Errorf("%q, %v: %q, %v, want %q", c.path, c.systemd, got, err, c.want)
		}
	}
	if got, err := cgroupOf("/a\"\nb", false); err == nil {
		t.Errorf("%q", got)
	}
}
