package runtime

// Phase is a phase of a verb that reports progress.
type Phase string

// The phases of a checkpoint. PhaseFiles includes attached host files.
const (
	PhaseFiles     Phase = "files"     // read file data; bytes, total unknown
	PhaseProcesses Phase = "processes" // CRIU dumps the processes, and the remaining files are read; not counted
	PhaseStoring   Phase = "storing"   // store file lists and process images; bytes of the images
	PhaseSyncing   Phase = "syncing"   // wait for the disk; not counted
)

// The phases of a restore. Between PhaseLooking and PhaseStaging are those of the undo
// checkpoint.
const (
	PhaseImages    Phase = "images"     // stage process images; bytes
	PhaseLooking   Phase = "looking"    // compare the present files with the checkpoint's; bytes that had to be read
	PhaseStaging   Phase = "staging"    // stage what the files lack beside them; bytes
	PhaseEffects   Phase = "effects"    // run undo commands; not counted
	PhaseStopping  Phase = "stopping"   // end the old processes; not counted
	PhasePutting   Phase = "putting"    // swap files, or put them back after a failure; bytes that had to be read
	PhaseProving   Phase = "proving"    // compare them with the checkpoint; bytes that had to be read
	PhaseStarting  Phase = "starting"   // start processes; not counted. Then PhaseSyncing
	PhaseHostFiles Phase = "host files" // put back attached host files; not counted
)

// PhaseForking covers all the work of making forks from a checkpoint: bytes of files and
// process images. Before it come the phases of the checkpoint, if one is taken.
const PhaseForking Phase = "forking"

// Phases lists all phases.
var Phases = []Phase{PhaseFiles, PhaseProcesses, PhaseStoring, PhaseSyncing, PhaseImages, PhaseLooking,
	PhaseStaging, PhaseEffects,
	PhaseStopping, PhasePutting, PhaseProving, PhaseStarting, PhaseHostFiles, PhaseForking}

// Step is the phase that a verb is in, and its progress.
type Step struct {
	Phase Phase `json:"phase"`
	Done  int64 `json:"done"`  // bytes; 0 in phases that are not counted
	Total int64 `json:"total"` // 0: not known
}

// Steps is called now and then during a verb with several phases, by one goroutine at a
// time: once for every finished phase, with its final numbers, and during a phase when its
// numbers have changed. A phase that is retried starts over. The verb does not wait for
// Steps, and a panic in it does not affect the verb, but ends the calls. No call begins
// after the verb has returned; a long one may still be running.
type Steps func(Step)
