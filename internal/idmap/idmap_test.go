package idmap

import (
	"errors"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/agentbox/agentbox/internal/fault"
)

func TestCheck(t *testing.T) {
	for _, m := range []Map{
		{}, {Base: 0, Size: 10}, {Base: 1 << 31, Size: 1}, {Base: 10}, {Base: 1<<31 - 10, Size: 11},
	} {
		if _, err := m.Namespace(); !errors.Is(err, fault.ErrInvalid) {
			t.Errorf("%+v: %v", m, err)
		}
	}
}

func TestIDs(t *testing.T) {
	m := &Map{Base: 524288, Size: 65536}
	for tree, host := range map[int]int{0: 524288, 1000: 525288, 65535: 589823} {
		if got, err := m.Host(tree); got != host || err != nil {
			t.Errorf("%d is %d on the host, %v", tree, got, err)
		}
		if got := m.Tree(host); got != tree {
			t.Errorf("%d is %d in the tree", host, got)
		}
	}
	for _, id := range []int{-1, 65536, 1 << 40} {
		if _, err := m.Host(id); !errors.Is(err, fault.ErrInvalid) {
			t.Errorf("%d: %v", id, err)
		}
	}
	for _, id := range []int{0, 524287, 589824} {
		if got := m.Tree(id); got != nobody {
			t.Errorf("%d of the host is %d in the tree", id, got)
		}
	}
	var none *Map
	if id, err := none.Host(7); id != 7 || err != nil || none.Tree(7) != 7 {
		t.Errorf("without a map: %d, %v", id, err)
	}
}

// TestXattrs: what goes to the host comes back the same, whatever it is.
func TestXattrs(t *testing.T) {
	m := &Map{Base: 524288, Size: 65536}
	const caps = "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"
	if got, err := m.XattrOnHost("security.capability", caps); err != nil ||
		got != "\x01\x00\x00\x03"+caps[4:]+"\x00\x00\x08\x00" {
		t.Errorf("capabilities: %q, %v", got, err)
	}
	const acl = "\x02\x00\x00\x00" + "\x01\x00\x06\x00\xff\xff\xff\xff" + "\x02\x00\x04\x00\xe8\x03\x00\x00" +
		"\x10\x00\x06\x00\xff\xff\xff\xff"
	if got, err := m.XattrOnHost("system.posix_acl_access", acl); err != nil ||
		got != strings.Replace(acl, "\xe8\x03\x00\x00", "\xe8\x03\x08\x00", 1) {
		t.Errorf("an access control list: %q, %v", got, err)
	}
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.SampledFrom([]string{
			"security.capability", "system.posix_acl_access", "system.posix_acl_default", "user.any",
		}).Draw(t, "name")
		value := rapid.OneOf(rapid.Just(caps), rapid.Just(acl), rapid.StringN(0, 40, 40)).Draw(t, "value")
		host, err := m.XattrOnHost(name, value)
		if err != nil {
			return // an id that the tree cannot have
		}
		if back, err := m.XattrInTree(name, host); err != nil || back != value {
			t.Fatalf("%s %q is %q on the host and comes back as %q, %v", name, value, host, back, err)
		}
	})
}
