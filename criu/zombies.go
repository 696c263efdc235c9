package criu

import (
	"fmt"
	"path/filepath"

	criucore "github.com/checkpoint-restore/go-criu/v7/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/pstree"
	"google.golang.org/protobuf/proto"
)

// AdoptZombies changes images that are about to be restored so that the first process makes its
// zombies itself. One of another session, as what an exec has left behind, CRIU makes through a
// helper that ends. The first process waits for the zombie, and where the helper counts as done
// before it has ended, CRIU waits without end. A zombie's session has no use any more:
// it gets that of the first process. Done twice it is done once.
func AdoptZombies(dir string) error {
	var entries []*pstree.PstreeEntry
	var first *pstree.PstreeEntry
	path := filepath.Join(dir, "pstree.img")
	err := readImage(path, magicPstree, maxProcesses, func(data []byte) error {
		e := &pstree.PstreeEntry{}
		if err := proto.Unmarshal(data, e); err != nil {
			return err
		}
		if entries = append(entries, e); e.GetPpid() == 0 {
			first = e
		}
		return nil
	})
	if err != nil || first == nil {
		return err
	}
	sessions := map[uint32]uint32{} // by process
	for _, e := range entries {
		sessions[e.GetPid()] = e.GetSid()
	}
	changed := false
	for _, e := range entries {
		if e.GetPpid() != first.GetPid() || e.GetSid() == first.GetSid() ||
			e.GetSid() == e.GetPid() || e.GetSid() == 0 {
			continue
		}
		ended, err := hasEnded(dir, e.GetPid())
		if err != nil {
			return err
		}
		if !ended {
			continue
		}
		e.Sid, changed = proto.Uint32(first.GetSid()), true
		if sessions[e.GetPgid()] != first.GetSid() { // no process joins a group of another session
			e.Pgid = proto.Uint32(e.GetPid())
		}
	}
	if !changed {
		return nil
	}
	messages := make([]proto.Message, len(entries))
	for i, e := range entries {
		messages[i] = e
	}
	return writeImage(path, magicPstree, messages)
}

// hasEnded reports whether a process of images is a zombie.
func hasEnded(dir string, pid uint32) (ended bool, err error) {
	err = readImage(filepath.Join(dir, fmt.Sprintf("core-%d.img", pid)), magicCore, 1, func(data []byte) error {
		var e criucore.CoreEntry
		if err := proto.Unmarshal(data, &e); err != nil {
			return err
		}
		state := e.GetTc().GetTaskState()
		ended = state == taskDead || state == taskZombie
		return nil
	})
	return ended, err
}
