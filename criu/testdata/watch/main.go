// Command watch has inotify watches, and writes what they tell to /events.
package main

import (
	"bytes"
	"os"
	"syscall"
)

func main() {
	os.Mkdir("/some dir", 0755)
	os.WriteFile("/some dir/file", nil, 0644)
	fd, _ := syscall.InotifyInit()
	syscall.InotifyAddWatch(fd, "/some dir", syscall.IN_CREATE)
	syscall.InotifyAddWatch(fd, "/some dir/file", syscall.IN_MODIFY)
	syscall.InotifyAddWatch(fd, "/bin/busybox", syscall.IN_MODIFY)
	syscall.InotifyAddWatch(fd, "/", syscall.IN_MODIFY)
	os.WriteFile("/ready", nil, 0644)
	buf := make([]byte, 4096)
	for {
		n, err := syscall.Read(fd, buf)
		if err != nil {
			continue
		}
		f, _ := os.OpenFile("/events", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0644)
		f.Write(bytes.ReplaceAll(buf[16:n], []byte{0}, nil))
		f.Close()
	}
}
