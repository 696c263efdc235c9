package runtime

import (
	"context"
	"io"
	"time"
)

// CheckpointService is the part of Service that takes checkpoints, restores them, and
// moves them between machines.
type CheckpointService interface {
	Checkpoint(ctx context.Context, sandbox string, opts CheckpointOptions) (Checkpoint, error)
	// Restore puts a sandbox back to a checkpoint. If it returns an error and a Restored
	// that names a checkpoint, the sandbox is restored, but its host files are not.
	Restore(ctx context.Context, sandbox string, opts RestoreOptions) (Restored, error)
	// PlanRestore returns what Restore would change, and changes nothing.
	PlanRestore(ctx context.Context, sandbox string, opts RestoreOptions) (RestorePlan, error)
	// Undo is a Restore to a step back in the sandbox's history, Redo one to what Undo has
	// left. A step is a checkpoint, in the line from the head back, and the files as they
	// are if they have changed since the head. A checkpoint and any other Restore end what
	// Redo leads to.
	Undo(ctx context.Context, sandbox string, opts UndoOptions) (Restored, error)
	Redo(ctx context.Context, sandbox string, opts UndoOptions) (Restored, error)
	// PlanUndo returns what Undo or, with opts.Redo, Redo would change, and changes nothing.
	PlanUndo(ctx context.Context, sandbox string, opts UndoOptions) (RestorePlan, error)
	// UndoList lists where Undo and Redo lead.
	UndoList(ctx context.Context, sandbox string) (UndoList, error)
	// Fork starts new sandboxes from a checkpoint; the origin is untouched.
	Fork(ctx context.Context, sandbox string, opts ForkOptions) ([]Forked, error)

	Checkpoints(ctx context.Context, filter CheckpointFilter) ([]Checkpoint, error)
	// CheckpointInfo returns one, by id, id prefix or SANDBOX@NAME, or by a unique bare name.
	CheckpointInfo(ctx context.Context, checkpoint string) (Checkpoint, error)
	// History lists a sandbox's checkpoints with their ancestry, newest first.
	History(ctx context.Context, sandbox string, opts HistoryOptions) ([]HistoryEntry, error)
	// Diff returns what changed in a sandbox's files between two states.
	Diff(ctx context.Context, req DiffRequest) (Diff, error)

	// PinCheckpoint protects a checkpoint from Prune, or ends the protection.
	PinCheckpoint(ctx context.Context, checkpoint string, pinned bool) error
	// TagCheckpoint gives a checkpoint one more name in its sandbox. It moves a tag
	// that another checkpoint of the sandbox has.
	TagCheckpoint(ctx context.Context, checkpoint, tag string) error
	// UntagCheckpoint removes a tag (SANDBOX@TAG).
	UntagCheckpoint(ctx context.Context, ref string) error
	RemoveCheckpoint(ctx context.Context, checkpoint string) error
	// RemoveCheckpoints removes all matching checkpoints in any state, except pinned ones.
	// The filter must not be empty, and Trigger and Labels need a Policy or a Sandbox. A
	// checkpoint that cannot be removed does not stop it: it returns the removed ones
	// with the error.
	RemoveCheckpoints(ctx context.Context, filter CheckpointFilter) (RemovedCheckpoints, error)
	// VerifyCheckpoint rereads all of a checkpoint; a mismatch is ErrCorrupt.
	VerifyCheckpoint(ctx context.Context, checkpoint string) error

	// ExportCheckpoint writes an archive that Podman, CRI-O and checkpointctl read.
	ExportCheckpoint(ctx context.Context, checkpoint string, w io.Writer, opts ExportOptions) error
	// ImportCheckpoint reads an archive that ExportCheckpoint or `podman container
	// checkpoint --export` wrote. The checkpoint belongs to a sandbox that does not
	// exist yet: Restore with its name creates it.
	ImportCheckpoint(ctx context.Context, r io.Reader, opts ImportOptions) (Checkpoint, error)
	// PushCheckpoint stores a checkpoint in a registry, PullCheckpoint brings one back.
	PushCheckpoint(ctx context.Context, checkpoint, reference string, opts RegistryOptions) (Pushed, error)
	PullCheckpoint(ctx context.Context, reference string, opts RegistryOptions) (Checkpoint, error)
}

// Progress is called now and then during long work with done and total, in the unit
// that the verb names; total 0: not known.
type Progress func(done, total int64)

// UndoOptions modify Undo and Redo; the zero value goes one step.
type UndoOptions struct {
	Steps int `json:"steps"` // 0: 1
	// Paths limits Undo to what lies at these absolute paths in the sandbox, and below them:
	// it goes back in place, and the processes go on. The head stays, and Redo leads where it
	// did. At most 100.
	Paths      []string      `json:"paths,omitempty"`
	FilesOnly  bool          `json:"files_only"`  // leave the processes out: the command starts anew
	NoEffects  bool          `json:"no_effects"`  // as in RestoreOptions, and so are the following
	NoAttached bool          `json:"no_attached"` //
	Timeout    time.Duration `json:"timeout_ns"`
	Redo       bool          `json:"redo"` // for PlanUndo: of Redo
	Progress   Steps         `json:"-"`
}

// UndoList is the documented JSON of `agentbox undo --list`; it only ever grows.
type UndoList struct {
	Sandbox     string `json:"sandbox"` // its id
	SandboxName string `json:"sandbox_name"`
	// Changed: the files have changed since the head, so that Undo leads there first.
	Changed bool       `json:"changed"`
	Steps   []UndoStep `json:"steps"` // from where Redo ends back to the oldest
}

// UndoStep is a checkpoint that Undo or Redo leads to, or the one at which the sandbox is.
type UndoStep struct {
	Checkpoint
	// Back is how many steps back it is: Undo leads there with as many. Negative: Redo
	// does. 0: the sandbox is there.
	Back int `json:"back"`
}

// ForkOptions modify Fork.
type ForkOptions struct {
	Checkpoint string            `json:"checkpoint"` // empty: take one now
	Count      int               `json:"count"`      // 0: 1
	Names      []string          `json:"names"`      // of the forks, as many as Count; empty: ORIGIN-fork-XXXX
	FilesOnly  bool              `json:"files_only"` // leave the processes out: the command starts anew
	Labels     map[string]string `json:"labels"`
	NoStart    bool              `json:"no_start"` // create them without starting them
	Secrets    []Secret          `json:"secrets"`  // sources of secrets, instead of the origin's
	// the lease that they are removed with; empty: none, whatever the origin has
	Lease string `json:"lease"`
	Group string `json:"group"` // a name that they share
	// without Checkpoint, for a removed sandbox: the newest may be a foreign one
	Foreign  bool   `json:"foreign"`
	Grants   Grants `json:"grants"` // what the spec of a foreign checkpoint gets
	Progress Steps  `json:"-"`
}

// Forked reports one fork.
type Forked struct {
	Sandbox    Sandbox    `json:"sandbox"`
	Checkpoint Checkpoint `json:"checkpoint"`
	// Reseeded names the parts of the origin's identity that were replaced, Shared
	// those that the fork still has in common with it.
	Reseeded []string      `json:"reseeded"`
	Shared   []string      `json:"shared"`
	Took     time.Duration `json:"took_ns"`
	Warnings []string      `json:"warnings,omitempty"`
}

// RestorePlan is the documented JSON of `agentbox restore --dry-run`.
type RestorePlan struct {
	Sandbox     string        `json:"sandbox"` // its id
	SandboxName string        `json:"sandbox_name"`
	Checkpoint  Checkpoint    `json:"checkpoint"`
	Changes     []Change      `json:"changes"` // as a user of the sandbox will see them
	Added       int           `json:"added"`
	Deleted     int           `json:"deleted"`
	Modified    int           `json:"modified"`
	Bytes       int64         `json:"bytes"`     // of file data that will be written
	Ends        []PlanProcess `json:"ends"`      // processes that will end
	Begins      []PlanProcess `json:"begins"`    // processes of the checkpoint that will resume
	Effects     []string      `json:"effects"`   // all other effects, a sentence each
	Recreates   bool          `json:"recreates"` // the sandbox was removed and will be recreated
	// Compensates lists the effects whose undo commands will run, in that order.
	Compensates []Effect `json:"compensates"`
	// Attached lists the checkpoint's attached files.
	Attached []RestoredFile `json:"attached,omitempty"`
}

// PlanProcess is one process, numbered as in the sandbox.
type PlanProcess struct {
	Pid     int    `json:"pid"`
	Command string `json:"command"`
}

// PruneOptions modify Prune. Without a rule it only frees space and removes records of
// failed checkpoints.
type PruneOptions struct {
	Sandbox    string        `json:"sandbox"` // empty: all
	KeepLast   int           `json:"keep_last"`
	KeepWithin time.Duration `json:"keep_within_ns"`
	KeepHourly int           `json:"keep_hourly"`
	KeepDaily  int           `json:"keep_daily"`
	KeepWeekly int           `json:"keep_weekly"`
	MaxBytes   int64         `json:"max_bytes"` // at rest, of all checkpoints; 0: no limit
	MaxWaste   float64       `json:"max_waste"` // unused share of a pack above which it is rewritten; 0: 0.25
	DryRun     bool          `json:"dry_run"`
	Progress   Progress      `json:"-"` // bytes
}

// Pruned is the documented JSON of `agentbox prune`.
type Pruned struct {
	Removed []PrunedCheckpoint `json:"removed"`
	Kept    []PrunedCheckpoint `json:"kept"`
	Freed   int64              `json:"freed"`  // bytes at rest
	Packs   int                `json:"packs"`  // deleted or rewritten
	Before  int64              `json:"before"` // bytes at rest
	After   int64              `json:"after"`
	DryRun  bool               `json:"dry_run"`
}

// PrunedCheckpoint is one checkpoint and the rules that decided.
type PrunedCheckpoint struct {
	Checkpoint Checkpoint `json:"checkpoint"`
	Reasons    []string   `json:"reasons"`
}

// Usage is the documented JSON of `agentbox df`. Sizes are in bytes.
type Usage struct {
	Root        string            `json:"root"`
	Stored      int64             `json:"stored"`  // all packs
	Raw         int64             `json:"raw"`     // unpacked size of the pieces in them
	Logical     int64             `json:"logical"` // total size of every file and page of all checkpoints
	Waste       int64             `json:"waste"`   // stored, but unused: prune frees it
	Packs       int               `json:"packs"`
	Pieces      int64             `json:"pieces"`
	Checkpoints []CheckpointUsage `json:"checkpoints"`
	Sandboxes   []SandboxUsage    `json:"sandboxes"`
	Disk        DiskUsage         `json:"disk"` // disk usage of the root, as du -x counts
	Free        int64             `json:"free"` // on the filesystem
}

// DiskUsage is disk usage in blocks, directories included. A file with several hard
// links counts once.
type DiskUsage struct {
	Total     int64 `json:"total"`     // all of the root: the next five
	Packs     int64 `json:"packs"`     // of all checkpoints
	Records   int64 `json:"records"`   // of checkpoints: manifests, records of failed ones
	Sandboxes int64 `json:"sandboxes"` // and volumes: their own files, logs, specs
	Images    int64 `json:"images"`
	Rest      int64 `json:"rest"`      // state.db, audit log, events, caches, room set aside for a full disk
	Elsewhere int64 `json:"elsewhere"` // files of sandboxes that an engine keeps outside of the root
}

// CheckpointUsage is the space that one checkpoint takes.
type CheckpointUsage struct {
	Checkpoint Checkpoint `json:"checkpoint"`
	Needs      int64      `json:"needs"`  // at rest, pieces shared with others included
	Unique     int64      `json:"unique"` // freed if only this one is removed
}

// SandboxUsage is the space that one sandbox's writable files take.
type SandboxUsage struct {
	ID       string `json:"id"`
	Name     string `json:"name"`
	Upperdir int64  `json:"upperdir"` // on the disk
}

// VerifyOptions modify Verify.
type VerifyOptions struct {
	Checkpoints []string `json:"checkpoints"`        // none: all
	ReadData    bool     `json:"read_data"`          // read every byte, not only what shows that all data is present
	Rehearse    bool     `json:"rehearse,omitempty"` // restore each named, full checkpoint into a fork, and compare
	Progress    Progress `json:"-"`
}

// VerifyReport is the documented JSON of `agentbox verify`.
type VerifyReport struct {
	Checkpoints int       `json:"checkpoints"` // checked
	Pieces      int64     `json:"pieces"`
	Bytes       int64     `json:"bytes"`
	Damaged     []Damaged `json:"damaged"`
	// Undamaged checkpoints whose processes CRIU will not restore; their files are fine.
	Unrestorable []Damaged   `json:"unrestorable"`
	Notes        []string    `json:"notes"`               // damage that affects no checkpoint
	Rehearsed    []Rehearsal `json:"rehearsed,omitempty"` // if requested
}

// Rehearsal is the result of a checkpoint's trial restore and comparison.
type Rehearsal struct {
	Checkpoint  Checkpoint    `json:"checkpoint"`
	Took        time.Duration `json:"took"`      // nanoseconds
	Processes   int           `json:"processes"` // compared, as are the following
	Threads     int           `json:"threads"`
	Descriptors int           `json:"descriptors"` // open files
	Locks       int           `json:"locks"`
	Pages       int64         `json:"pages"`   // of memory
	Differs     []string      `json:"differs"` // a sentence each; at most 101
}

// Damaged is one checkpoint that cannot be restored completely.
type Damaged struct {
	Checkpoint Checkpoint `json:"checkpoint"`
	What       []string   `json:"what"` // e.g. "usr/lib/x: piece blake3:... in pack ..."; at most 100
}

// Reindexed reports Reindex.
type Reindexed struct {
	Packs       int      `json:"packs"`
	Pieces      int64    `json:"pieces"`
	Checkpoints int      `json:"checkpoints"` // whose records were rebuilt
	Notes       []string `json:"notes"`       // what could not be used, and why
}

// ExportOptions modify ExportCheckpoint.
type ExportOptions struct {
	Compress   string   `json:"compress"`   // "zstd" (default), "gzip" or "none"
	Recipients []string `json:"recipients"` // age recipients; empty: not encrypted
	Progress   Progress `json:"-"`          // bytes of file and image data
}

// ImportOptions modify ImportCheckpoint.
type ImportOptions struct {
	Name       string `json:"name"`       // of the sandbox, instead of the one in the archive
	Image      string `json:"image"`      // the image to layer it over, if the archive's digest is unknown here
	Identities string `json:"identities"` // a file of age identities, for an encrypted archive
	// Trust accepts processes with more rights than a sandbox has by default. CRIU
	// follows process images as root, so their author must be trusted.
	Trust    bool     `json:"trust"`
	Progress Progress `json:"-"`
}

// RegistryOptions modify PushCheckpoint and PullCheckpoint.
type RegistryOptions struct {
	PlainHTTP bool     `json:"plain_http"` // also for registries on other hosts than this one
	Progress  Progress `json:"-"`
}

// Pushed reports PushCheckpoint.
type Pushed struct {
	Reference string `json:"reference"` // by digest
	Bytes     int64  `json:"bytes"`     // sent
	Skipped   int64  `json:"skipped"`   // bytes that were already there
}

// HistoryEntry is one checkpoint in the history of a sandbox. It is the
// documented JSON of `agentbox log`; it only ever grows.
type HistoryEntry struct {
	Checkpoint
	Children []string `json:"children"` // ids of the checkpoints taken from here, newest first
	Head     bool     `json:"head"`     // the sandbox was last at this one
	// ParentDeleted: the parent was deleted; Parent is its nearest remaining ancestor.
	ParentDeleted bool         `json:"parent_deleted"`
	Forks         []ForkedInto `json:"forks"` // sandboxes that were forked from here, by name
	// effects outside the sandbox while it was at this one, newest first
	Effects []Effect `json:"effects,omitempty"`
}

// ForkedInto is a fork in the history of its origin. The fork may have been removed
// since, leaving checkpoints behind.
type ForkedInto struct {
	Sandbox     string `json:"sandbox"` // its id
	SandboxName string `json:"sandbox_name"`
}

// HistoryOptions modify History.
type HistoryOptions struct {
	All bool `json:"all"` // pending and failed checkpoints too
}

// ApplyOptions modify Apply.
type ApplyOptions struct {
	DryRun bool `json:"dry_run"` // only report what would be done
	Undo   bool `json:"undo"`    // undo the last Apply
	Force  bool `json:"force"`   // overwrite what others have changed in the original in the meantime

	// What follows is for workspaces, which lie over directories that may have changed, too.
	Workspace string   `json:"workspace,omitempty"` // only this one, by its path in the sandbox
	Paths     []string `json:"paths,omitempty"`     // only what is at these paths in the sandbox, and below them
	// What is done where both sides have changed something that cannot be merged; without
	// any of them nothing is applied then. Force is Theirs.
	Markers bool `json:"markers,omitempty"` // write both versions of a text into it, with conflict markers
	Ours    bool `json:"ours,omitempty"`    // keep what the directory has
	Theirs  bool `json:"theirs,omitempty"`  // take what the sandbox has

	// Owners applies changes of ownership too. Without it existing files keep their
	// owner, and new ones get the owner of their directory.
	Owners bool `json:"owners,omitempty"`
	// Allow lists files that may be copied with set-id bits or capabilities, and files, or
	// directories with all below them, that may be although git would run programs because of
	// them.
	Allow []string `json:"allow,omitempty"`

	// Patch fills in Change.Patch, Change.Seen and Change.Hunks in a dry run of workspaces.
	Patch bool `json:"patch,omitempty"`
	// Picks choose from the changes that such a dry run of the same checkpoint has shown; null: all.
	// A path that is not as it was shown makes the apply fail.
	Picks []ApplyPick `json:"picks,omitzero"`
}

// ApplyPick is a change that is applied.
type ApplyPick struct {
	Path    string `json:"path"`
	PathB64 string `json:"path_b64,omitempty"`
	Seen    string `json:"seen"` // Change.Seen
	// Hunks are those of a text that are applied, counted from 0; null: all that has changed of it.
	Hunks []int `json:"hunks,omitzero"`
	Mode  bool  `json:"mode,omitempty"` // with Hunks: its new mode, too
}

// Applied is the documented JSON of `agentbox apply`; it only ever grows.
type Applied struct {
	Sandbox     string   `json:"sandbox"` // its id
	SandboxName string   `json:"sandbox_name"`
	Original    string   `json:"original"` // the directory
	DryRun      bool     `json:"dry_run"`
	Undone      bool     `json:"undone"`    // the last Apply was undone
	Changes     []Change `json:"changes"`   // A, M, D and T, by path; empty after an undo
	Conflicts   []string `json:"conflicts"` // paths that others have changed in the original in the meantime

	Refused []Refusal `json:"refused"` // by a dry run; a real run fails instead

	Checkpoint string             `json:"checkpoint,omitempty"` // of workspaces: what was applied, by its id
	Workspaces []AppliedWorkspace `json:"workspaces,omitempty"`
	Merged     []string           `json:"merged,omitempty"` // paths of files that both sides had changed
	Refs       []AppliedRef       `json:"refs,omitempty"`   // of the Conflicts that are refs of git
	// The validators of workspaces, in order: of a dry run those that would run.
	Validators []Validated `json:"validators,omitempty"`
	// The checks of canaries: of a dry run all that there are, else those of which something has come.
	Canaries []Validated `json:"canaries,omitempty"`
	// Risk rates the changes of workspaces; nil: there are none.
	Risk *Risk `json:"risk,omitempty"`
	// Approval is what a person has to approve, or has approved; nil: the apply needs no approval.
	Approval *Approval `json:"approval,omitempty"`
}

// AppliedRef is a ref of git that both sides have moved.
type AppliedRef struct {
	Path      string `json:"path"`      // in the sandbox
	Ref       string `json:"ref"`       // as in refs/heads/main
	Directory string `json:"directory"` // the commit that it is there; empty: it is none, or a symbolic one
	Sandbox   string `json:"sandbox"`   // likewise
}

// Risk rates what an Apply changes by a fixed table of reasons.
type Risk struct {
	Score   int          `json:"score"` // the sum of the points
	Reasons []RiskReason `json:"reasons"`
}

// RiskReason is one reason of a risk.
type RiskReason struct {
	Text   string `json:"text"` // such as "deletes 40 files"
	Points int    `json:"points"`
}

// Approval is a request to approve one Apply, with just these changes. A person grants it, and the Apply
// uses it up.
type Approval struct {
	ID          string    `json:"id"`   // the beginning of Plan
	Plan        string    `json:"plan"` // a SHA-256 digest, in hex, of all that the Apply would do
	Sandbox     string    `json:"sandbox"`
	SandboxName string    `json:"sandbox_name"`
	Checkpoint  string    `json:"checkpoint"`
	Originals   []string  `json:"originals"` // the directories
	Changes     int       `json:"changes"`   // how many
	Some        []string  `json:"some"`      // the first of them, such as "M /work/go.mod"
	Risk        Risk      `json:"risk"`
	Why         []string  `json:"why"` // the rules that ask for it
	Asked       time.Time `json:"asked"`
	Approved    time.Time `json:"approved,omitzero"`
	Expires     time.Time `json:"expires"` // the request or, once it is granted, the approval
	// Lasts is how long an approval counts.
	Lasts time.Duration `json:"lasts_ns"`
}

// Validated is a validator of an Apply, and its result.
type Validated struct {
	Name     string        `json:"name"`
	From     string        `json:"from"`                // where its rule stands: a policy, or a file
	Exit     *int          `json:"exit,omitempty"`      // its exit code; nil: it has not run
	TimedOut bool          `json:"timed_out,omitempty"` // it was ended because its time was over
	Took     time.Duration `json:"took_ns,omitempty"`
	Output   string        `json:"output,omitempty"` // the end of what it has printed
}

// OK reports whether the validator has passed.
func (v Validated) OK() bool { return v.Exit != nil && *v.Exit == 0 && !v.TimedOut }

// LabelValidates is the label of a sandbox in which a validator runs. Its value is the id of the
// sandbox whose changes are applied.
const LabelValidates = "agentbox.validates"

// AppliedWorkspace is a workspace that an Apply is about.
type AppliedWorkspace struct {
	Path     string `json:"path"`     // in the sandbox
	Original string `json:"original"` // the directory
}

// Refusal is one path that must not be copied into the original.
type Refusal struct {
	Path     string `json:"path"`
	PathB64  string `json:"path_b64,omitempty"`
	Reason   string `json:"reason"`
	MayAllow bool   `json:"may_allow"` // by ApplyOptions.Allow
}

// DiffImage, in place of a checkpoint, means the image: the files before the sandbox
// changed any. A checkpoint of this name must be given by its id.
const DiffImage = "image"

// DiffRequest asks what changed in a sandbox's files.
type DiffRequest struct {
	Sandbox string `json:"sandbox"`
	// a checkpoint, or DiffImage; empty: the head checkpoint, and the image when there is none
	// and for a sandbox with workspaces
	From string `json:"from"`
	To   string `json:"to"` // a checkpoint, or DiffImage; empty: the files as they are now

	// Paths limits it to what lies at these absolute paths in the sandbox, and below them; empty: all.
	Paths []string `json:"paths,omitempty"`

	Paranoid  bool `json:"paranoid"`   // read every file again; see overlay.DiffOptions
	NoRenames bool `json:"no_renames"` // a renamed file is one deleted and one added
	Limit     int  `json:"limit"`      // list at most so many; 0: 1,000,000

	// Patch fills in Change.Patch: what changed in the text of files, as
	// `diff -u` has it. Files over 1 MiB or with a NUL are "Binary files differ".
	Patch bool `json:"patch"`
	// Relative is an absolute path of a directory in the sandbox: patches name what lies below
	// it by its path from there.
	Relative string `json:"relative,omitempty"`
}

// Kinds of DiffState.
const (
	DiffOfImage      = "image"
	DiffOfCheckpoint = "checkpoint"
	DiffOfNow        = "now"
)

// DiffState is one side of a Diff.
type DiffState struct {
	Kind       string    `json:"kind"`
	Checkpoint string    `json:"checkpoint,omitempty"` // its id
	Name       string    `json:"name,omitempty"`
	Created    time.Time `json:"created,omitzero"`
}

// Diff is the documented JSON of `agentbox diff`; it only ever grows.
type Diff struct {
	Sandbox     string    `json:"sandbox"` // its id
	SandboxName string    `json:"sandbox_name"`
	From        DiffState `json:"from"`
	To          DiffState `json:"to"`
	Changes     []Change  `json:"changes"`   // by path, a directory before what is in it
	Truncated   bool      `json:"truncated"` // there are more than were asked for
}

// Change is one path that differs.
type Change struct {
	Path    string `json:"path"` // absolute, in the sandbox
	PathB64 string `json:"path_b64,omitempty"`
	// Change is A (added), M (modified), D (deleted), T (another type of thing)
	// or R (a file renamed from From).
	Change  string `json:"change"`
	From    string `json:"from,omitempty"`
	FromB64 string `json:"from_b64,omitempty"` // the _b64 members are there, in base64, where the name is not UTF-8
	// dir, file, symlink, fifo, socket, char or block; of what is there, or was
	Type string `json:"type"`
	// What tells in which respects: content, target, device, mode, owner,
	// xattrs, mtime; type for T.
	What []string   `json:"what,omitempty"`
	Old  *FileState `json:"old,omitempty"`
	New  *FileState `json:"new,omitempty"`

	Patch string `json:"patch,omitempty"` // see DiffRequest.Patch; of an apply from the first @@ on

	// Of an apply with ApplyOptions.Patch.
	Seen string `json:"seen,omitempty"` // sums up what the change is of and to
	// Hunks is how many runs of added and removed lines Patch has, if each can be applied without
	// the others.
	Hunks int `json:"hunks,omitempty"`
}

// FileState is one path of one state.
type FileState struct {
	Type   string `json:"type"`
	Mode   string `json:"mode"` // octal, e.g. "0644"
	UID    uint32 `json:"uid"`
	GID    uint32 `json:"gid"`
	Size   int64  `json:"size"`             // of a file; else 0
	Mtime  string `json:"mtime,omitempty"`  // RFC 3339, or seconds since 1970 where that has no form for it
	Target string `json:"target,omitempty"` // of a symlink
	Device string `json:"device,omitempty"` // major:minor
}
