// Package audit keeps on record who did what to which sandbox.
//
// Log.Observer sees each verb of an Engine. One that may change something leaves a record
// before it begins and another with its outcome; so does what the Engine does by itself,
// such as to end a lease. Verbs that change nothing leave none.
//
// The records are in ROOT/audit: lines of JSON in segments, each named by the
// sequence number of its first. A record has the hash of the one before it, and
// its own: SHA-256, in hexadecimal, of its line up to (and without) `,"hash":`.
// So what is changed, removed, inserted or put elsewhere is found; that the last
// ones are gone is found by the file head, which has the number and the hash of
// the last record that is known to be on the disk, or by a hash that somebody
// has noted elsewhere. The file ROOT/audit.head says the same, and stays when all of
// ROOT/audit is gone: a log goes on from there, so that the gap is found ever after.
// Whoever can write there can write all of it anew: only such a note finds that.
//
// The first record of a verb survives this process, the second one, with all
// before it, a power cut: it is on the disk before the caller is told. A verb
// whose first record cannot be written does not begin, unless it is one that
// frees space or stops something. A line that a crash has cut short has no
// newline; the next record tells of it.
package audit
