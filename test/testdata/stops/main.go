// Command stops begins four processes, each with threads that count, which stop themselves
// in each way there is, and counts itself.
package main

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"syscall"
	"time"
)

func main() {
	if len(os.Args) > 1 {
		stop(os.Args[1])
	}
	for _, signal := range []syscall.Signal{syscall.SIGSTOP, syscall.SIGTSTP, syscall.SIGTTIN, syscall.SIGTTOU} {
		cmd := exec.Command("/stops", strconv.Itoa(int(signal)))
		// In this session: the kernel stops no group that is orphaned.
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		if err := cmd.Start(); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	}
	count("/count")
}

func stop(signal string) {
	number, err := strconv.Atoi(signal)
	if err != nil {
		os.Exit(1)
	}
	begun := make(chan bool)
	for i := range 3 {
		go func() {
			runtime.LockOSThread()
			begun <- true
			count(fmt.Sprintf("/%d.%d", number, i))
		}()
		<-begun
	}
	_ = syscall.Kill(os.Getpid(), syscall.Signal(number))
	select {}
}

func count(name string) {
	for n := 1; ; n++ {
		if os.WriteFile(name+".new", []byte(strconv.Itoa(n)), 0o644) == nil {
			_ = os.Rename(name+".new", name)
		}
		time.Sleep(20 * time.Millisecond)
	}
}
