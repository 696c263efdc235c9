package wire

import (
	"context"
	"time"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/runtime"
)

// SecretValues are the secrets that come from variables in the caller's environment. They are never
// recorded.
type SecretValues struct {
	Variables map[string]string `json:"variables,omitempty"`
}

// WithSecrets has a verb take them from there, and from no environment of ours.
func (s *SecretValues) WithSecrets(ctx context.Context) context.Context {
	return runtime.WithVariables(ctx, s.Variables)
}

// Bodies that are no type of package runtime.
type (
	CreateBody struct {
		runtime.CreateRequest
		SecretValues
	}
	RestoreBody struct {
		runtime.RestoreOptions
		SecretValues
	}
	ForkBody struct {
		runtime.ForkOptions
		SecretValues
	}
	StartBody struct{ SecretValues }
	MountBody struct {
		Dir string `json:"dir"` // an empty directory on the host of the service
	}
	KillBody struct {
		Signal string `json:"signal"` // empty: KILL
	}
	StopBody struct {
		Timeout *time.Duration `json:"timeout_ns"` // before it is killed; null: 10 s
	}
	RestartBody struct {
		SecretValues
		StopBody
	}
	ExitBody struct {
		Exit int `json:"exit"`
	}
	RulesBody struct {
		Rules []string `json:"rules"`
	}
	PinBody struct {
		Pinned bool `json:"pinned"`
	}
	TagBody struct {
		Tag string `json:"tag"`
	}
	RegistryBody struct {
		Reference string                  `json:"reference"`
		Options   runtime.RegistryOptions `json:"options"`
	}
	PullBody struct {
		Reference string            `json:"reference"`
		Options   image.PullOptions `json:"options"`
	}
	PushBody struct {
		To      string              `json:"to"`
		Options image.SourceOptions `json:"options"`
	}
	NameBody struct {
		Name string `json:"name"`
	}
	AllBody struct {
		All bool `json:"all"`
	}
	CommitBody struct {
		Ref     string                `json:"ref"`
		To      string                `json:"to"`
		Options runtime.CommitOptions `json:"options"`
	}
)

// RenewBody is what a renewal may change.
type RenewBody struct {
	For time.Duration `json:"for_ns"` // the new deadline, from now on; 0: it stays
}

// Stat is a PathStat, with the names that are not UTF-8.
type Stat struct {
	runtime.PathStat
	NameB64 []byte `json:"name_b64,omitempty"`
	LinkB64 []byte `json:"link_b64,omitempty"`
}

// NewStat returns what is known of a path as a Stat.
func NewStat(st runtime.PathStat) Stat {
	s := Stat{PathStat: st}
	if t := NewText([]byte(st.Name)); t.B64 != nil {
		s.NameB64 = t.B64
	}
	if t := NewText([]byte(st.Link)); t.B64 != nil {
		s.LinkB64 = t.B64
	}
	return s
}

// Decoded returns what is known of the path.
func (s Stat) Decoded() runtime.PathStat {
	if s.NameB64 != nil {
		s.Name = string(s.NameB64)
	}
	if s.LinkB64 != nil {
		s.Link = string(s.LinkB64)
	}
	return s.PathStat
}
