package test

import "testing"

// A process that is killed at the very moment of a checkpoint has ended in it, or runs in it:
// each of the checkpoints can be restored.
func TestKilledAtCheckpoint(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.start("k", "--network", "none", "busybox", "sh", "-c",
		"n=0; while :; do sleep 1000 & kill $!; wait $!; n=$((n+1)); echo $n > /n.new; mv /n.new /n; done")
	for range 10 {
		id := b.checkpoint("k")
		b.ok("restore", "--no-undo", "k", id)
	}
	was := b.file("k", "n")
	b.eventually("the work goes on", func() bool { return b.file("k", "n") != was })
}
