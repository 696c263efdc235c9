package criu

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"

	criucore "github.com/checkpoint-restore/go-criu/v7/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/fdinfo"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/agentbox/agentbox/criu/proof"

	"github.com/agentbox/agentbox/criu/host"
)

// A timerfd with an interval is not armed between a tick and the read of it: the kernel
// arms it again when it is read, or asked for the time left. CRIU reads that time from
// /proc, where it is 0 meanwhile, and restores a timer that never ticks again. So such
// timers are asked for the time left when CRIU is done, and their images say that.

var idsName = regexp.MustCompile(`^ids-(\d+)\.img$`)

// mendTimers puts the time left into the images of timers that expired during the dump. record is
// of the processes, which still stand.
func mendTimers(dir string, record proof.Record) error {
	return rewriteImage(filepath.Join(dir, filesImage), magicFiles, func(data []byte) ([]byte, error) {
		var e fdinfo.FileEntry
		if err := proto.Unmarshal(data, &e); err != nil {
			return nil, err
		}
		t := e.GetTfd()
		if t == nil || t.GetVsec() != 0 || t.GetVnsec() != 0 {
			return data, nil
		}
		now, err := timerNow(dir, record, e.GetId())
		if err != nil || now.ticks == 0 {
			return data, err // it is not armed
		}
		t.Ticks = proto.Uint64(max(t.GetTicks(), 1))
		if t.GetIsec() != 0 || t.GetInsec() != 0 {
			t.Vsec, t.Vnsec = proto.Uint64(uint64(now.left.Sec)), proto.Uint64(uint64(now.left.Nsec))
		}
		return proto.MarshalOptions{AllowPartial: true}.Marshal(&e)
	})
}

type timerState struct {
	ticks uint64 // that nothing has read
	left  unix.Timespec
}

// timerNow asks a timerfd, by its id in the images, for its state. The next tick of one
// with an interval is then ahead of it, as after a read.
func timerNow(dir string, record proof.Record, id uint32) (s timerState, err error) {
	pid, fd, err := descriptorOf(dir, record, id)
	if err != nil || pid == 0 {
		return s, err
	}
	process, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return s, fmt.Errorf("timer of process %d: %w", pid, err)
	}
	defer unix.Close(process)
	timer, err := unix.PidfdGetfd(process, fd, 0)
	if err != nil {
		return s, fmt.Errorf("timer of process %d: %w", pid, err)
	}
	defer unix.Close(timer)
	info, err := os.ReadFile("/proc/self/fdinfo/" + strconv.Itoa(timer))
	if err != nil {
		return s, err
	}
	_, after, _ := bytes.Cut(info, []byte("\nticks:"))
	if f := bytes.Fields(after); len(f) > 0 {
		s.ticks, _ = strconv.ParseUint(string(f[0]), 10, 64)
	}
	var spec unix.ItimerSpec
	if err := unix.TimerfdGettime(timer, &spec); err != nil {
		return s, fmt.Errorf("timer of process %d: %w", pid, err)
	}
	if s.left = spec.Value; s.left.Nano() <= 0 {
		s.left = spec.Interval
	}
	return s, nil
}

// descriptorOf finds a descriptor, in a process on the host, of a file of the images.
func descriptorOf(dir string, record proof.Record, id uint32) (pid, fd int, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return 0, 0, err
	}
	for _, e := range entries {
		m := idsName.FindStringSubmatch(e.Name())
		if m == nil {
			continue
		}
		inside, _ := strconv.Atoi(m[1])
		var files uint32
		err := readImage(filepath.Join(dir, e.Name()), magicIDs, 1, func(data []byte) error {
			var ids criucore.TaskKobjIdsEntry
			err := proto.Unmarshal(data, &ids)
			files = ids.GetFilesId()
			return err
		})
		if err != nil {
			return 0, 0, err
		}
		found := false
		err = optionalImage(dir, fmt.Sprintf("fdinfo-%d.img", files), magicFdinfo, func(data []byte) error {
			var f fdinfo.FdinfoEntry
			err := proto.Unmarshal(data, &f)
			if f.GetId() == id {
				fd, found = int(f.GetFd()), true
			}
			return err
		})
		if err != nil {
			return 0, 0, err
		}
		if pid = record.Host(inside); found && pid != 0 {
			return pid, fd, nil
		}
	}
	return 0, 0, nil
}

// rewriteImage replaces the entries of an image, where there is one, by what fn makes of
// them. It never leaves half an image.
func rewriteImage(path string, magic uint32, fn func([]byte) ([]byte, error)) error {
	if _, err := os.Lstat(path); os.IsNotExist(err) {
		return nil
	}
	out := binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(nil, magicCommon), magic)
	changed := false
	err := readImage(path, magic, maxFiles, func(data []byte) error {
		made, err := fn(data)
		changed = changed || !bytes.Equal(made, data)
		out = append(binary.LittleEndian.AppendUint32(out, uint32(len(made))), made...)
		return err
	})
	if err != nil || !changed {
		return err
	}
	if err := host.Replace(path, out); err != nil {
		return fmt.Errorf("image %s: %w", filepath.Base(path), err)
	}
	return nil
}
