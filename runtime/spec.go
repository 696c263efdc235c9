package runtime

import (
	"encoding/json"
	"errors"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/agentbox/agentbox/internal/idmap"
)

// Spec is the requested configuration of a sandbox. It is stored with the sandbox and
// with each of its checkpoints, so its JSON form only ever grows.
type Spec struct {
	ID          string   `json:"id"`                     // 32 lower-case hex digits
	Name        string   `json:"name"`                   // unique on this root
	Image       string   `json:"image"`                  // as the user named it
	ImageDigest string   `json:"image_digest"`           // what it resolved to
	ImageSource string   `json:"image_source,omitempty"` // where to pull it again: REPOSITORY@DIGEST
	Args        []string `json:"args"`                   // the command, entrypoint included
	Env         []string `json:"env,omitempty"`
	Workdir     string   `json:"workdir"`        // absolute, inside the sandbox
	User        string   `json:"user,omitempty"` // name|uid[:group|gid], looked up inside the sandbox
	Hostname    string   `json:"hostname"`
	Terminal    bool     `json:"terminal,omitempty"`
	OpenStdin   bool     `json:"open_stdin,omitempty"`
	Init        bool     `json:"init,omitempty"`        // a small init reaps zombies and passes signals on
	ReadOnly    bool     `json:"read_only,omitempty"`   // the root filesystem is mounted read-only
	AutoRemove  bool     `json:"auto_remove,omitempty"` // --rm
	StopSignal  string   `json:"stop_signal,omitempty"` // default SIGTERM
	Mounts      []Mount  `json:"mounts,omitempty"`
	Secrets     []Secret `json:"secrets,omitempty"` // files of SecretsDir
	// directories that the image declares: made when missing, part of checkpoints; with docker an engine's volume each
	Volumes   []string  `json:"volumes,omitempty"`
	Network   Network   `json:"network"`
	Resources Resources `json:"resources"`
	Security  Security  `json:"security,omitzero"`
	// of its user namespace on the host; nil: it is in the host's own
	IDs *idmap.Map `json:"ids,omitempty"`
	// why it is in the host's own, where it could have been in another
	HostIDs string            `json:"host_ids,omitempty"`
	Labels  map[string]string `json:"labels,omitempty"`

	// CheckpointEvery asks for automatic checkpoints: "exec" for one before each Exec,
	// a time.Duration such as "5m0s", or both: "exec,5m0s". See policy.ParseEvery.
	CheckpointEvery string `json:"checkpoint_every,omitempty"`

	// Steps says whether a checkpoint is taken after each Exec that has changed a file:
	// StepsOn or StepsOff; empty: StepsOn with a workspace, else StepsOff.
	Steps string `json:"steps,omitempty"`

	// Lifetime bounds how long the sandbox lives.
	Lifetime Lifetime `json:"lifetime,omitzero"`

	// Restart says whether the sandbox is restarted after it has ended.
	Restart Restart `json:"restart,omitzero"`

	// Policy is the policy that the sandbox was created under; nil in the specs of
	// older versions and of adopted containers.
	Policy *Policy `json:"policy,omitempty"`

	// Adopted: the container was not created by agentbox but through its engine; see
	// Backend.Adopt. It is checkpointed and restored, but never recreated.
	Adopted bool   `json:"adopted,omitempty"`
	Backend string `json:"backend,omitempty"` // what runs it; empty in the specs of older versions: oci
}

// MountWorkspace is the type of a workspace: a directory of the host that the sandbox sees, and
// changes for itself alone. The directory stays as it is; what the sandbox changes is part of
// each of its checkpoints.
const MountWorkspace = "workspace"

// Values of Spec.Steps.
const (
	StepsOn  = "on"
	StepsOff = "off"
)

// TakesSteps reports whether a checkpoint is taken after each Exec that has changed a file.
func (s Spec) TakesSteps() bool {
	return s.Steps == StepsOn || s.Steps == "" && len(s.Workspaces()) > 0
}

// Mount is a bind mount, a workspace, a named volume of the engine, or a tmpfs. Of these only a
// workspace is part of a checkpoint's files.
type Mount struct {
	Type     string `json:"type"`             // "bind", MountWorkspace, "volume" or "tmpfs"
	Source   string `json:"source,omitempty"` // bind, workspace: an absolute host path; volume: its name
	Target   string `json:"target"`           // absolute, inside the sandbox
	ReadOnly bool   `json:"read_only,omitempty"`
	Options  string `json:"options,omitempty"` // tmpfs: e.g. "size=64m,mode=1777"
}

// Workspaces returns the mounts of s that are workspaces.
func (s Spec) Workspaces() (list []Mount) {
	for _, m := range s.Mounts {
		if m.Type == MountWorkspace {
			list = append(list, m)
		}
	}
	return list
}

// SecretsDir is where a sandbox finds its secrets, one file each.
const SecretsDir = "/run/secrets"

// Secret says where the content of a file in SecretsDir comes from at each start.
// The content itself is never recorded. The specs of checkpoints have only the name.
type Secret struct {
	Name string `json:"name"`
	File string `json:"file,omitempty"` // an absolute path of the host
	Env  string `json:"env,omitempty"`  // an environment variable of the process that starts the sandbox
}

// SecretFile is a secret as Start puts it into a sandbox.
type SecretFile struct {
	Name string
	Data []byte
}

// Network modes.
const (
	NetworkNone     = "none"     // a namespace with only lo, up
	NetworkHost     = "host"     // the host's own
	NetworkBridge   = "bridge"   // veth, bridge, NAT; the default
	NetworkFiltered = "filtered" // as bridge, but only Egress lets traffic out
)

// Network says how a sandbox reaches other hosts.
type Network struct {
	Mode  string `json:"mode"`
	Group string `json:"group,omitempty"` // bridge: sandboxes of one group reach each other, all others do not
	Ports []Port `json:"ports,omitempty"` // bridge and filtered only

	// Egress lists all that a filtered sandbox may reach, each "CIDR|IP|DOMAIN|*.DOMAIN [PORTS]".
	Egress []string `json:"egress,omitempty"`
}

// Port publishes a sandbox's port on the host.
type Port struct {
	HostIP   string `json:"host_ip,omitempty"` // empty: every address
	Host     uint16 `json:"host"`
	Sandbox  uint16 `json:"sandbox"`
	Protocol string `json:"protocol"` // "tcp" or "udp"
}

// Resources are limits; zero means none.
type Resources struct {
	Memory int64 `json:"memory,omitempty"` // bytes
	// bytes on top of Memory, where that is limited; 0: none, negative: no limit
	Swap    int64   `json:"swap,omitempty"`
	CPUs    float64 `json:"cpus,omitempty"`    // cores
	Pids    int64   `json:"pids,omitempty"`    // processes and threads
	IO      int64   `json:"io,omitempty"`      // bytes a second read, and as many written, on the disk of the upperdir
	Storage int64   `json:"storage,omitempty"` // bytes that the upperdir may take
}

// Security is the privileges of a sandbox's processes; the zero value is the default.
type Security struct {
	Capabilities    []string `json:"capabilities,omitzero"` // at most these, without CAP_; nil: the default ones
	NoNewPrivileges bool     `json:"no_new_privileges,omitempty"`
	NewPrivileges   bool     `json:"new_privileges,omitempty"` // requested; otherwise a policy grants none
	// "unconfined", or the digest of SeccompProfile; empty: the default profile
	Seccomp string `json:"seccomp,omitempty"`
	// the text of a file, as Docker has it; lists of sandboxes leave it out
	SeccompProfile string `json:"seccomp_profile,omitempty"`
	// a profile, or "unconfined"; empty: the usual one, where the host has AppArmor
	AppArmor string `json:"apparmor,omitempty"`
	IOUring  bool   `json:"io_uring,omitempty"` // otherwise the kernel appears to have none
}

// Policy is the policy of a sandbox, as it was when the sandbox was created.
type Policy struct {
	Name   string `json:"name"`
	Digest string `json:"digest"` // of Rules, in their canonical form
	// Rules are a policy file in JSON, with its bases resolved. Lists of sandboxes omit them.
	Rules json.RawMessage `json:"rules,omitempty"`
}

// Status of a sandbox, in Docker's words.
type Status string

// The states a sandbox can be in.
const (
	Created Status = "created"
	Running Status = "running"
	Paused  Status = "paused"
	Exited  Status = "exited"
	Unknown Status = "unknown" // its engine does not answer
)

// Process is what Exec starts in a running sandbox.
type Process struct {
	Args     []string `json:"args"`
	Env      []string `json:"env,omitempty"`     // added to the sandbox's own
	Workdir  string   `json:"workdir,omitempty"` // default: the sandbox's
	User     string   `json:"user,omitempty"`    // default: the sandbox's
	Terminal bool     `json:"terminal,omitempty"`
	Detach   bool     `json:"detach,omitempty"` // Exec returns once it runs; its output is dropped
	// Message is that of the checkpoint which Spec.Steps asks for; default: the program. The
	// arguments may be secrets.
	Message string `json:"message,omitempty"`
	NoStep  bool   `json:"no_step,omitempty"` // none is taken
}

// Size of a terminal in characters.
type Size struct {
	Width  uint16 `json:"width"`
	Height uint16 `json:"height"`
}

// Streams connect a caller to a process. Nil readers and writers are allowed:
// no input, dropped output. With a terminal all output arrives on Stdout.
type Streams struct {
	Stdin      io.Reader
	Stdout     io.Writer
	Stderr     io.Writer
	Resize     <-chan Size // terminal only; the first value is the initial size
	DetachKeys []byte      // terminal only; nil: none. A caller's usual choice is ctrl-p ctrl-q, {16, 17}
}

// ErrDetached ends an attachment when the user has typed the detach keys; the process
// goes on.
var ErrDetached = errors.New("detached")

// LogOptions select what Logs returns.
type LogOptions struct {
	Follow     bool      `json:"follow"`
	Tail       int       `json:"tail"` // lines; negative: all
	Since      time.Time `json:"since"`
	Timestamps bool      `json:"timestamps"`
}

// JoinEnv lets later settings of a variable replace earlier ones.
func JoinEnv(layers ...[]string) []string {
	var out []string
	at := map[string]int{}
	for _, kv := range slices.Concat(layers...) {
		k, _, _ := strings.Cut(kv, "=")
		if i, ok := at[k]; ok {
			out[i] = kv
			continue
		}
		at[k] = len(out)
		out = append(out, kv)
	}
	return out
}

// Grants are what a restore or a fork gives to the spec of a foreign checkpoint. Without
// them it gets nothing of the host: it runs its command over its image and files, with the
// network, the privileges and the policy of a sandbox that asks for none.
type Grants struct {
	TrustSpec bool    `json:"trust_spec"` // all that it asks for, within the policy; see Checkpoint.Asks
	Mounts    []Mount `json:"mounts"`
	Ports     []Port  `json:"ports"`
	Policy    string  `json:"policy"` // the name of the policy that decides; empty: default
}

// User namespaces of sandboxes.
const (
	UserNSHost = "host" // none: the host's ids
	UserNSAuto = "auto" // one with a range of ids of its own
)
