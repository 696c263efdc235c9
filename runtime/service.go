package runtime

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/policy"
)

// Service is the whole of agentbox as commands see it. It has five parts, so that a
// function can ask for the one that it needs. *engine.Engine and *api.Client implement
// it, and errors.Is works through both.
//
// Wherever a method takes a sandbox or a checkpoint it takes a name, an id or
// a unique prefix of an id, four digits or more. An ambiguous prefix is ErrInvalid.
type Service interface {
	SandboxService
	CheckpointService
	ImageService
	LeaseService
	HostService
	Close() error
}

// SandboxService is the part of Service that makes sandboxes, runs them and reaches into
// them.
type SandboxService interface {
	Create(ctx context.Context, req CreateRequest) (Sandbox, error)
	// Start starts a created or exited sandbox; see Backend.Start for streams and wait.
	Start(ctx context.Context, sandbox string, streams *Streams) (wait func() error, err error)
	Attach(ctx context.Context, sandbox string, streams Streams) error
	Exec(ctx context.Context, sandbox string, p Process, streams Streams) (exit int, err error)
	Wait(ctx context.Context, sandbox string) (Exit, error)
	Logs(ctx context.Context, sandbox string, opts LogOptions, stdout, stderr io.Writer) error
	Kill(ctx context.Context, sandbox, signal string) error
	// Stop sends the stop signal, and SIGKILL after timeout; a negative one is 10 s.
	Stop(ctx context.Context, sandbox string, timeout time.Duration) error
	// Restart stops and starts the sandbox as one operation; no other verb runs in
	// between. A sandbox that could not be started again (for example, because a secret
	// is missing) is not stopped.
	Restart(ctx context.Context, sandbox string, timeout time.Duration) error
	Pause(ctx context.Context, sandbox string) error
	Unpause(ctx context.Context, sandbox string) error
	Remove(ctx context.Context, sandbox string, opts RemoveOptions) error

	Sandbox(ctx context.Context, sandbox string) (Sandbox, error)
	// Sandboxes lists all sandboxes, newest first. Their specs lack the rules of policies and
	// seccomp profiles, which Sandbox has; entries may share what their specs point to.
	Sandboxes(ctx context.Context) ([]Sandbox, error)
	// Stats returns the resource usage of all sandboxes, newest first, or of the named
	// ones, in that order. A sandbox that ends in the meantime is left out; an unknown
	// name is ErrNotFound.
	Stats(ctx context.Context, opts StatsOptions) ([]Stats, error)

	// CopyFrom, Stat and List read the files of a sandbox as they are now or, where they are
	// given SANDBOX@CHECKPOINT, as a checkpoint has them. SANDBOX@DiffImage are the files of
	// the image. What the sandbox mounts over its root is in no checkpoint, except volumes
	// that were taken along.

	// CopyFrom writes path as a tar stream, as `docker cp c:path -` does.
	CopyFrom(ctx context.Context, sandbox, path string, w io.Writer) error
	// CopyTo extracts a tar stream into the directory path.
	CopyTo(ctx context.Context, sandbox, path string, r io.Reader) error
	// Mount mounts all of it read-only on dir, an empty directory of the caller's on the host, calls
	// shown, and returns when it has been unmounted, or unmounts it when ctx ends, which is no error.
	// It is not for the files as they are now.
	Mount(ctx context.Context, sandbox, dir string, shown func(Mounted)) error
	// Stat describes path; it does not follow a final symlink.
	Stat(ctx context.Context, sandbox, path string) (PathStat, error)
	// List calls fn for path and, if it is a directory or a symlink to one, for what is in
	// it, by name. An error of fn ends it and is returned.
	List(ctx context.Context, sandbox, path string, opts ListOptions, fn func(FileEntry) error) error
}

// Mounted is what Mount has mounted.
type Mounted struct {
	Dir string `json:"dir"` // where it really is
}

// Local is a Service whose sandboxes are on this host and accessible to this process.
// *Engine is one, *api.Client is not.
type Local interface {
	Service
	// Files runs fn on the sandbox's root filesystem, whether it runs or is stopped.
	// The jail is good until fn returns.
	Files(ctx context.Context, sandbox string, fn func(*policy.Jail) error) error
}

// UsualWorkspaceFiles bounds the files in the directories of a sandbox's workspaces.
const UsualWorkspaceFiles = 1_000_000

// CreateRequest asks for a sandbox. Empty fields take the image's values, then defaults.
type CreateRequest struct {
	// ID and ImageDigest are filled in; Args is the command without the entrypoint
	Spec       Spec              `json:"spec"`
	Entrypoint []string          `json:"entrypoint"` // nil: the image's
	Pull       image.PullOptions `json:"pull"`

	// Policy is the one that decides; nil: this host's policy called PolicyName or, if
	// that is empty, default.
	Policy     *policy.Policy `json:"policy"`
	PolicyName string         `json:"policy_name"`
	// Requests in Docker's terms, in addition to Spec.Security, into which the policy
	// translates them.
	CapAdd     []string `json:"cap_add"`
	CapDrop    []string `json:"cap_drop"`
	Privileged bool     `json:"privileged"`
	UserNS     string   `json:"userns"` // UserNSAuto or UserNSHost; empty: the former, where that is possible

	// WorkspaceFiles is how many files the directories of its workspaces may have in all; 0:
	// UsualWorkspaceFiles, negative: any number.
	WorkspaceFiles int64 `json:"workspace_files,omitempty"`

	Lease string `json:"lease"` // the lease that it is removed with; empty: none
	Group string `json:"group"` // a name that it shares with others; empty: none

	Setup *Setup `json:"setup"` // nil: the sandbox begins with what the image has

	// ToStart: the caller starts it next. If its process ends before that, the
	// sandbox is removed. Caller is the process; 0: this one.
	ToStart bool `json:"to_start,omitempty"`
	Caller  int  `json:"-"`
}

// Sandbox is the documented JSON of `agentbox inspect`; it only ever grows.
type Sandbox struct {
	ID          string            `json:"id"`
	Name        string            `json:"name"`
	Status      Status            `json:"status"`
	Pid         int               `json:"pid"` // 0 unless running or paused
	ExitCode    int               `json:"exit_code"`
	Upperdir    string            `json:"upperdir"`
	Image       string            `json:"image"`
	ImageDigest string            `json:"image_digest"`
	Backend     string            `json:"backend"`
	Head        string            `json:"head"` // id of the checkpoint it was last at; may be empty
	Attempt     int               `json:"attempt"`
	Created     time.Time         `json:"created"`
	Started     time.Time         `json:"started,omitzero"`
	Finished    time.Time         `json:"finished,omitzero"`
	Labels      map[string]string `json:"labels"`
	Address     string            `json:"address,omitempty"`
	Expires     time.Time         `json:"expires,omitzero"`  // when its --ttl is over, as far as the clock stays
	Expired     bool              `json:"expired,omitempty"` // its TTL is over, and it cannot be started
	// it has exited, and the kernel killed one of its processes for lack of memory
	OOMKilled bool       `json:"oom_killed,omitempty"`
	Limits    *LimitHits `json:"limit_hits,omitempty"` // by Service.Sandbox only
	Restarts  *Restarts  `json:"restarts,omitempty"`   // of one with a restart policy
	// an --rm sandbox that stays when it exits, because a restore or a restart of it failed
	Kept bool `json:"kept,omitempty"`
	// why it is on hold: a restore of it failed; see Service.ReleaseHold
	Held  string `json:"held,omitempty"`
	Lease string `json:"lease,omitempty"` // id of the lease that it is removed with
	Group string `json:"group,omitempty"`
	// the checkpoint or restore that is under way, by Service.Sandboxes only
	Work *Work `json:"work,omitempty"`
	Spec Spec  `json:"spec"`
}

// LimitHits counts how often a sandbox has hit its limits since it was last started.
// Not every backend knows the counts of an exited sandbox.
type LimitHits struct {
	OOMKills int64       `json:"oom_kills,omitempty"` // processes that the kernel killed for lack of memory
	Pids     int64       `json:"pids,omitempty"`      // processes and threads that could not be created
	Storage  *StorageHit `json:"storage,omitempty"`   // its files reached their limit
}

// Checkpoint kinds and states.
const (
	KindFiles = "files"
	KindFull  = "full"

	CheckpointPending = "pending"
	CheckpointReady   = "ready"
	CheckpointFailed  = "failed"
)

// Checkpoint is the documented JSON of `agentbox checkpoint inspect`; it only ever grows.
type Checkpoint struct {
	ID          string    `json:"id"`
	Name        string    `json:"name,omitempty"`
	Sandbox     string    `json:"sandbox"` // the sandbox's id
	SandboxName string    `json:"sandbox_name"`
	Kind        string    `json:"kind"`
	Status      string    `json:"status"`
	Error       string    `json:"error,omitempty"` // why it failed
	Parent      string    `json:"parent"`          // may be empty
	Trigger     string    `json:"trigger"`
	Message     string    `json:"message,omitempty"` // what it is, in the words of what asked for it
	Policy      string    `json:"policy,omitempty"`  // the name of the sandbox's
	Created     time.Time `json:"created"`
	Files       int64     `json:"files"`     // entries in the upperdir
	Processes   int       `json:"processes"` // 0 for files-only
	Bytes       int64     `json:"bytes"`     // at rest, of all that it needs
	// Changes counts the paths that have changed since its parent, or the image if it has none.
	// CheckpointInfo, History and UndoList count them; else they are there once counted.
	Changes     *Changes          `json:"changes,omitempty"`
	Digest      string            `json:"digest"` // of the manifest
	ImageDigest string            `json:"image_digest"`
	Labels      map[string]string `json:"labels"`
	Frozen      time.Duration     `json:"frozen_ns"` // how long the sandbox was frozen
	Added       int64             `json:"added"`     // bytes that it added to the store
	Unchanged   bool              `json:"unchanged"` // it added none
	// Reused: no file had changed since this one, so that Checkpoint with IfChanged took none.
	Reused bool `json:"reused,omitempty"`
	Pinned bool `json:"pinned"`
	// id of the lease that it is removed with, unless it is pinned
	Lease    string         `json:"lease,omitempty"`
	Tags     []string       `json:"tags,omitempty"`
	Damaged  string         `json:"damaged,omitempty"` // what the last Verify found; restored only with Salvage
	Warnings []string       `json:"warnings,omitempty"`
	Attached []AttachedFile `json:"attached,omitempty"` // files of the host that belong to it

	// Foreign: it was imported or pulled, or its origin is unknown. Its spec is then only
	// a request: Command is the command that it would run, and Asks lists what a restore
	// or a fork gives it only if Grants allow it. Created is the time of its arrival.
	Foreign bool     `json:"foreign,omitempty"`
	Command []string `json:"command,omitempty"`
	Asks    []string `json:"asks,omitempty"`
}

// Changes counts paths of a sandbox, workspaces included, that differ between two states.
type Changes struct {
	Added    int64 `json:"added"`
	Modified int64 `json:"modified"`
	Deleted  int64 `json:"deleted"`
}

// AttachedFile is a file of the host that belongs to a checkpoint.
type AttachedFile struct {
	Path   string `json:"path"`
	Size   int64  `json:"size"`             // bytes
	Absent bool   `json:"absent,omitempty"` // the file did not exist: a restore removes it
}

// What a restore does with an attached file.
const (
	AttachedPut     = "put" // replaced by the checkpoint's version
	AttachedRemoved = "removed"
	AttachedSame    = "same" // it was already the same
	AttachedLeft    = "left" // left alone; a warning, or the restore's error, says why
	// AttachedReturned: put, then changed back because another file could not be put.
	AttachedReturned = "returned"
)

// ByNoAttached is why a restore with NoAttached leaves attached files alone, in its warning.
const ByNoAttached = "by --no-attached"

// RestoredFile is an attached file and what a restore does with it.
type RestoredFile struct {
	Path   string `json:"path"`
	Action string `json:"action"`
}

// TCP choices: what happens to established connections.
const (
	TCPEstablished = "established" // dumped, and live after a restore
	TCPClose       = "close"       // dumped, and closed after a restore
	TCPRefuse      = "refuse"      // the checkpoint fails
)

// CheckpointOptions modify Checkpoint; the zero value takes a full checkpoint
// of a running sandbox and a files-only one of a stopped one.
type CheckpointOptions struct {
	Name      string `json:"name"`
	FilesOnly bool   `json:"files_only"`
	Stop      bool   `json:"stop"`
	Strict    bool   `json:"strict"` // fail if a process would be left out
	// WithVolumes includes the engine's volumes that are on this host.
	WithVolumes bool              `json:"with_volumes"`
	Labels      map[string]string `json:"labels"`
	Trigger     string            `json:"trigger"` // default "manual"
	Message     string            `json:"message"` // what it is: at most 1000 bytes of text
	TCP         string            `json:"tcp"`     // default TCPEstablished
	Timeout     time.Duration     `json:"timeout_ns"`
	Paranoid    bool              `json:"paranoid"` // read every file again, not only those whose inode has changed
	// IfChanged takes none if the sandbox has exactly the files of its head, the checkpoint
	// that it was last at, which is returned with Unchanged and Reused. Not with Name, Stop
	// or Attach.
	IfChanged bool `json:"if_changed"`
	// Lease has the checkpoint removed with a lease. Temporary has it removed with the
	// sandbox's lease.
	Lease     string `json:"lease"`
	Temporary bool   `json:"temporary"`
	// Attach lists absolute paths of regular files of the host that belong to the
	// checkpoint. A file may be missing: a restore puts that back too.
	Attach []string `json:"attach"`
	// Automatic marks the checkpoints that Spec.CheckpointEvery and Spec.Steps ask for. In such a
	// sandbox, no other checkpoint may use their Trigger.
	Automatic bool `json:"-"`

	Progress Steps `json:"-"`
}

// RestoreOptions modify Restore.
type RestoreOptions struct {
	// Checkpoint is a name, tag, id or prefix of one, HEAD, {AGE} or one of these with ~N;
	// empty: HEAD, the one that the sandbox was last at. Of a removed sandbox that is the
	// newest except undo checkpoints.
	Checkpoint string `json:"checkpoint"`
	// Trigger and Labels choose the newest ready one that has them instead; not with
	// Checkpoint or Undo.
	Trigger   string            `json:"trigger"`
	Labels    map[string]string `json:"labels"`
	FilesOnly bool              `json:"files_only"` // leave the processes of a full checkpoint out
	// read every file, regardless of its times, and prove it against the manifest before the start
	Verify    bool `json:"verify"`
	Undo      bool `json:"undo"`       // to the state that the last restore replaced
	NoUndo    bool `json:"no_undo"`    // keep no undo checkpoint of the present state
	Salvage   bool `json:"salvage"`    // restore what is intact of a damaged checkpoint
	NoEffects bool `json:"no_effects"` // compensate none of what came after it; see Effect
	// Timeout bounds the restore, its processes included; 0: only CRIU's part is bounded.
	Timeout time.Duration `json:"timeout_ns"`

	// NoAttached leaves the checkpoint's attached files alone. Attached puts them back
	// even where that is not the default: for a checkpoint that was imported or pulled,
	// and for a sandbox that was removed.
	NoAttached bool `json:"no_attached"`
	Attached   bool `json:"attached"`

	// Strategy is one of Strategies; empty: one attempt, with all that the checkpoint has.
	Strategy string `json:"strategy"`
	// Alert is called when the restore fails for good: the absolute path of a
	// program of the host, which runs as root, or an http or https URL.
	Alert string `json:"alert"`
	// AlertSecret is a file of the host, accessible to root only, with the key that
	// signs what is posted to the URL.
	AlertSecret string `json:"alert_secret"`

	// Foreign chooses the newest checkpoint, even a foreign one, unless one is named.
	Foreign bool `json:"foreign"`
	// Grants are what the spec of a foreign checkpoint gets if the sandbox is made
	// from it.
	Grants Grants `json:"grants"`

	// Secrets say where secrets come from: permanently if the sandbox is recreated,
	// otherwise for this start.
	Secrets []Secret `json:"secrets"`
	// Pull says how to get the image of a recreated sandbox if it is not present.
	Pull image.PullOptions `json:"pull"`

	Progress Steps `json:"-"`
}

// TriggerBase is the trigger of the files-only checkpoint that Create takes of a sandbox with a
// workspace.
const TriggerBase = "base"

// TriggerUndo is the trigger of the undo checkpoints that Restore takes.
const TriggerUndo = "undo"

// Restored reports a restore.
type Restored struct {
	Sandbox    Sandbox       `json:"sandbox"`
	Checkpoint Checkpoint    `json:"checkpoint"`
	Recreated  bool          `json:"recreated"`
	Verified   bool          `json:"verified"`
	Undo       string        `json:"undo,omitempty"` // id of the undo checkpoint
	Changed    int           `json:"changed"`        // number of changed paths in the upperdir
	Lost       []string      `json:"lost,omitempty"` // what Salvage could not restore
	Down       time.Duration `json:"down_ns"`        // from the end of the old processes to the start of the new ones
	// time for the files: undo checkpoint, comparison, swap, proof, sync
	Files    time.Duration `json:"files_ns"`
	Warnings []string      `json:"warnings,omitempty"`
	// Attached lists the checkpoint's attached files.
	Attached []RestoredFile `json:"attached,omitempty"`

	// For a restore with a strategy: the strategy that succeeded, the failed attempts,
	// and whether the checkpoint's processes could not be restored, so that the command
	// was started anew.
	Strategy string           `json:"strategy,omitempty"`
	Attempts []RestoreAttempt `json:"attempts,omitempty"`
	Degraded bool             `json:"degraded,omitempty"`

	// Compensated lists the effects whose undo commands were run, in that order; their
	// status is the result.
	Compensated []Effect `json:"compensated,omitempty"`

	Redo int `json:"redo,omitempty"` // how many steps Service.Redo can go forward from here
}

// CheckpointFilter selects checkpoints; the zero value selects all ready ones except
// undo checkpoints (TriggerUndo).
type CheckpointFilter struct {
	Sandbox string            `json:"sandbox"`
	All     bool              `json:"all"` // pending, failed and undo ones too
	Labels  map[string]string `json:"labels"`
	Trigger string            `json:"trigger"`
	Policy  string            `json:"policy"` // the name of the policy that their sandbox was created under
}

// RemovedCheckpoints reports RemoveCheckpoints.
type RemovedCheckpoints struct {
	Removed []string `json:"removed"` // ids, newest first
	Pinned  []string `json:"pinned"`  // ids of pinned ones that matched
}

// RemoveOptions modify Remove.
type RemoveOptions struct {
	Force       bool `json:"force"`       // kill it if it runs
	AtExit      bool `json:"at_exit"`     // at the exit of an --rm sandbox: unless it is kept
	Checkpoints bool `json:"checkpoints"` // its checkpoints too
}

// ListOptions modify List. Whatever they say, the path itself is listed, first, and what has a
// FileEntry.Mount.
type ListOptions struct {
	Recursive bool   // all below the path, each directory before its contents
	Name      string // only what has a name that this pattern matches; see path.Match
	Type      string // only what is of this FileState.Type
}

// FileEntry is the documented JSON of `agentbox ls`; it only ever grows.
type FileEntry struct {
	Path    string `json:"path"` // absolute, in the sandbox
	PathB64 string `json:"path_b64,omitempty"`
	FileState
	// Mount is the kind of what the sandbox mounts there, if its content is not part of
	// the checkpoint: bind, volume, tmpfs, proc, sysfs, devices or secrets.
	Mount string `json:"mount,omitempty"`
}

// PathStat describes one path in a sandbox.
type PathStat struct {
	Name string `json:"name"`
	Mode uint32 `json:"mode"` // as io/fs.FileMode
	Size int64  `json:"size"`
	Link string `json:"link,omitempty"`
	Dir  bool   `json:"dir"`
}

// Recovery reports what RecoverInterrupted did, one sentence per action.
type Recovery struct {
	Actions []string `json:"actions"`
}

// Triggers of the checkpoints that Spec.CheckpointEvery and Spec.Steps ask for.
const (
	TriggerExec     = policy.TriggerExec
	TriggerInterval = policy.TriggerInterval
	TriggerTool     = "tool"   // of agents: automatic, before a call that may change something
	TriggerMCP      = "mcp"    // of agents: by the checkpoint tool
	TriggerPrompt   = "prompt" // of agentbox shell: automatic, at a prompt
)

// Work is a verb under way on a sandbox.
type Work struct {
	Verb  string    `json:"verb"`
	Since time.Time `json:"since"`
}

// Strategies to restore. Auto tries them in the order of rising cost, and loss counts as
// cost: full, then files, for a checkpoint with processes; files for one without; recreate
// last, because it destroys what could still be examined. If all fail, auto puts the
// sandbox on hold.
const (
	StrategyAuto     = "auto"
	StrategyFiles    = "files"    // the files; the command starts anew
	StrategyFull     = "full"     // the files and the processes
	StrategyRecreate = "recreate" // what the checkpoint has, in a new container
)

// Strategies lists all strategies.
var Strategies = []string{StrategyAuto, StrategyFiles, StrategyFull, StrategyRecreate}

// RestoreAttempt is a failed attempt to restore.
type RestoreAttempt struct {
	Time     time.Time     `json:"time"`
	Strategy string        `json:"strategy"` // or "recreate-files": auto's second way to recreate, without processes
	Try      int           `json:"try"`      // from 1, within this strategy
	Error    string        `json:"error"`
	Next     string        `json:"next"` // the strategy tried next, "" for none
	Took     time.Duration `json:"took_ns"`
}

// FoldAttempts returns the errors of attempts, one line for consecutive equal ones.
func FoldAttempts(tries []RestoreAttempt) (lines []string) {
	for i, n := 0, 0; i < len(tries); i += n {
		t := tries[i]
		for n = 1; i+n < len(tries) && tries[i+n].Strategy == t.Strategy && tries[i+n].Error == t.Error; n++ {
		}
		times := ""
		if n > 1 {
			times = fmt.Sprintf(" (%d times)", n)
		}
		lines = append(lines, fmt.Sprintf("%s%s: %s", t.Strategy, times, strings.Join(strings.Fields(t.Error), " ")))
	}
	return lines
}
