package runtime

// Phase is what a verb of several phases is at.
type Phase string

// The phases of a checkpoint. Host files are read with the others.
const (
	PhaseFiles     Phase = "files"     // file data is read; bytes, the total is not known
	PhaseProcesses Phase = "processes" // CRIU writes the processes out, and files that are left are read; not counted
	PhaseStoring   Phase = "storing"   // lists of files, and images of processes, go into the store; bytes of the images
	PhaseSyncing   Phase = "syncing"   // the disk is waited for; not counted
)

// The phases of a restore. Between PhaseLooking and PhaseStaging are those of the
// checkpoint of what it replaces.
const (
	PhaseImages    Phase = "images"     // process images are laid out; bytes
	PhaseLooking   Phase = "looking"    // the present files are compared with the checkpoint's; bytes that had to be read
	PhaseStaging   Phase = "staging"    // what the files lack is laid out beside them; bytes
	PhaseEffects   Phase = "effects"    // undo commands run; not counted
	PhaseStopping  Phase = "stopping"   // the old processes end; not counted
	PhasePutting   Phase = "putting"    // files are exchanged, or put back after a failure; bytes that had to be read
	PhaseProving   Phase = "proving"    // and compared with the checkpoint; bytes that had to be read
	PhaseStarting  Phase = "starting"   // processes start; not counted. Then PhaseSyncing
	PhaseHostFiles Phase = "host files" // files of the host are put back; not counted
)

// PhaseForking is all that makes forks of a checkpoint: bytes of files and process
// images. Before it are the phases of the checkpoint, if one is taken.
const PhaseForking Phase = "forking"

// Phases are all there are.
var Phases = []Phase{PhaseFiles, PhaseProcesses, PhaseStoring, PhaseSyncing, PhaseImages, PhaseLooking, PhaseStaging, PhaseEffects,
	PhaseStopping, PhasePutting, PhaseProving, PhaseStarting, PhaseHostFiles, PhaseForking}

// Step tells what a verb of several phases is at, and how far that is.
type Step struct {
	Phase Phase `json:"phase"`
	Done  int64 `json:"done"`  // bytes; 0 in phases that are not counted
	Total int64 `json:"total"` // 0: not known
}

// Steps is called now and then during a verb of several phases, by one goroutine at
// a time: for every phase once it is over, with what it came to, and meanwhile where
// its numbers have changed. What is tried again begins again. The verb does not wait
// for it, and has no harm of a panic in it, after which it is not called any more.
// When the verb has returned no call begins; one that takes long may still be under way.
type Steps func(Step)
